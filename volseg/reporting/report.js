"use strict";
// Sorts a table by the column whose button is pressed: numbers by value, other text last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const column = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const keyed = [...body.rows].map((row) => {
      const text = row.cells[column].textContent.trim();
      return { row, text, number: text === "" ? NaN : Number(text) };
    });
    const numeric = keyed.some((one) => !Number.isNaN(one.number));
    keyed.sort((a, b) => {
      if (!numeric) return (up ? 1 : -1) * a.text.localeCompare(b.text, undefined, { numeric: true });
      if (Number.isNaN(a.number) || Number.isNaN(b.number)) return Number.isNaN(a.number) - Number.isNaN(b.number);
      return (up ? 1 : -1) * (a.number - b.number);
    });
    body.append(...keyed.map((one) => one.row));
  });
}
window.addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});
