const RENAMED_MS = 1000;

const close = (sidecar) => {
  const icon = document.querySelector(`.lm-TabBar-tab[data-id="${sidecar.id}"] .lm-TabBar-tabCloseIcon`);
  for (const kind of icon ? ["pointerdown", "pointerup"] : []) {
    const { x, y } = icon.getBoundingClientRect();
    icon.dispatchEvent(new PointerEvent(kind, { bubbles: true, button: 0, clientX: x + 2, clientY: y + 2 }));
  }
};

export default {
  render({ model, el }) {
    el.style.display = "none";
    for (const dead of document.querySelectorAll(".jupyterlab-sidecar .gpumem-panel.jupyter-widgets-disconnected"))
      close(dead.closest(".jupyterlab-sidecar"));
    const rename = () => {
      const id = el.closest(".jupyterlab-sidecar")?.id;
      const label = id && document.querySelector(`.lm-TabBar-tab[data-id="${id}"] .lm-TabBar-tabLabel`);
      if (label && label.textContent !== model.get("label")) label.textContent = model.get("label");
    };
    const timer = setInterval(rename, RENAMED_MS);
    return () => clearInterval(timer);
  },
};
