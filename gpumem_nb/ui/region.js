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
