export default {
  render({ model, el }) {
    el.style.display = "none";
    const heard = ({ target }) => {
      const knob = target.closest?.(".gpumem-panel .gpumem-knob");
      if (!knob || knob.closest(".gpumem-panel") !== el.closest(".gpumem-panel")) return;
      const name = [...knob.classList].find((one) => one.startsWith("gpumem-knob-"));
      model.set("knob", name ? name.slice("gpumem-knob-".length) : "");
      model.save_changes();
    };
    document.addEventListener("focusin", heard);
    return () => document.removeEventListener("focusin", heard);
  },
};
