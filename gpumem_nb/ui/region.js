export default {
  render({ model, el }) {
    const show = () => {
      if (el.dataset.html === model.get("html")) return;
      const focused = el.contains(document.activeElement) && document.activeElement.dataset.press;
      el.dataset.html = model.get("html");
      el.innerHTML = el.dataset.html;
      if (focused) [...el.querySelectorAll("[data-press]")].find((one) => one.dataset.press === focused)?.focus();
    };
    const closes = ({ key }) => {
      const panel = el.closest(".gpumem-panel");
      const here = document.activeElement === document.body || panel?.contains(document.activeElement);
      if (key === "Escape" && here) el.querySelector('[data-press="close"]')?.click();
    };
    el.addEventListener("click", ({ target }) => {
      const pressed = target.closest("[data-press]");
      if (pressed) model.send(pressed.dataset.press);
    });
    el.setAttribute("role", model.get("role"));
    if (model.get("label")) el.setAttribute("aria-label", model.get("label"));
    model.on("change:html", show);
    document.addEventListener("keydown", closes);
    show();
    return () => document.removeEventListener("keydown", closes);
  },
};
