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
