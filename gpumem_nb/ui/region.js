export default {
  render({ model, el }) {
    const show = () => {
      if (el.dataset.html === model.get("html")) return;
      const focused = el.contains(document.activeElement) && document.activeElement.dataset.press;
      el.dataset.html = model.get("html");
      el.innerHTML = el.dataset.html;
      if (focused) [...el.querySelectorAll("[data-press]")].find((one) => one.dataset.press === focused)?.focus();
    };
    // In the capturing phase, by the target: JupyterLab takes Escape for itself, and the focus out of the panel.
    const closes = ({ key, target }) => {
      const here = target === document.body || el.closest(".gpumem-panel")?.contains(target);
      if (key === "Escape" && here) el.querySelector('[data-press="close"]')?.click();
    };
    el.addEventListener("click", ({ target }) => {
      const pressed = target.closest("[data-press]");
      if (pressed) model.send(pressed.dataset.press);
    });
    el.setAttribute("role", model.get("role"));
    if (model.get("label")) el.setAttribute("aria-label", model.get("label"));
    model.on("change:html", show);
    document.addEventListener("keydown", closes, true);
    show();
    return () => document.removeEventListener("keydown", closes, true);
  },
};
