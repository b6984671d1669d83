"""A piece of the page that changes while people read it or have it read to them."""

from __future__ import annotations

import anywidget
import traitlets

# The element with the role stays and its content changes: only then do screen readers announce the change.
_ESM = """
export default {
  render({ model, el }) {
    const show = () => {
      if (el.dataset.html === model.get("html")) return;
      el.dataset.html = model.get("html");
      el.innerHTML = el.dataset.html;
    };
    el.setAttribute("role", model.get("role"));
    if (model.get("label")) el.setAttribute("aria-label", model.get("label"));
    model.on("change:html", show);
    show();
  },
};
"""


class Region(anywidget.AnyWidget):
    """HTML under an ARIA role: ``status`` and ``alert`` are announced when they change, ``group`` is not."""

    _esm = _ESM
    html = traitlets.Unicode().tag(sync=True)
    role = traitlets.Unicode("group").tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)


# Lumino listens for pointer events on a tab's close icon; a click alone does nothing.
_CLOSE_DEAD_TABS = """
export default {
  render({ el }) {
    el.style.display = "none";
    for (const dead of document.querySelectorAll(".jupyterlab-sidecar .gpumem-panel.jupyter-widgets-disconnected")) {
      const tab = document.querySelector(`.lm-TabBar-tab[data-id="${dead.closest(".jupyterlab-sidecar").id}"]`);
      const icon = tab && tab.querySelector(".lm-TabBar-tabCloseIcon");
      for (const kind of icon ? ["pointerdown", "pointerup"] : []) {
        const { x, y } = icon.getBoundingClientRect();
        icon.dispatchEvent(new PointerEvent(kind, { bubbles: true, button: 0, clientX: x + 2, clientY: y + 2 }));
      }
    }
  },
};
"""


class ClosesDeadTabs(anywidget.AnyWidget):
    """Draws nothing, and closes docked panels of a kernel that is gone, of which this kernel knows nothing."""

    _esm = _CLOSE_DEAD_TABS
