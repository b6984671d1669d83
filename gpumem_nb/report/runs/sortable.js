(script => {
  const table = script.previousElementSibling, places = PLACES;
  if (!table?.tBodies?.length || table.dataset.sortable) return;
  table.dataset.sortable = "yes";
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort by this";
    button.style.cssText = "all: unset; cursor: pointer; text-decoration: underline dotted";
    button.onfocus = () => button.style.outline = "2px solid #E69F00";
    button.onblur = () => button.style.outline = "";
    button.append(...head.childNodes);
    const arrow = document.createElement("span");
    arrow.setAttribute("aria-hidden", "true");
    head.append(button, arrow);
    button.onclick = () => {
      const downwards = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => {
        other.removeAttribute("aria-sort");
        if (other.lastChild?.tagName === "SPAN") other.lastChild.textContent = "";
      });
      head.setAttribute("aria-sort", downwards ? "descending" : "ascending");
      arrow.textContent = downwards ? " \u25be" : " \u25b4";
      const sign = downwards ? -1 : 1, of = places[column];
      const sorted = rows.map((_, row) => row);
      sorted.sort((a, b) => (of[a] === null) - (of[b] === null) || sign * (of[a] - of[b]) || a - b);
      body.append(...sorted.map(row => rows[row]));
    };
  });
})(document.currentScript);
