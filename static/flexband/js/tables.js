// table.stack becomes blocks on narrow screens. display:block drops the table roles, so they are put back,
// and every cell gets its column's header as a label.
const ROLES = [["thead, tbody, tfoot", "rowgroup"], ["tr", "row"], ["thead th", "columnheader"], ["tbody th, tfoot th", "rowheader"], ["td", "cell"]];

function headerTexts(table) {
  const row = table.tHead?.rows[table.tHead.rows.length - 1];
  return row ? [...row.cells].map((cell) => [...cell.childNodes].map((node) => node.textContent.trim()).filter(Boolean).join(" ")) : [];
}

function restore(table) {
  table.setAttribute("role", "table");
  for (const [selector, role] of ROLES) for (const part of table.querySelectorAll(selector)) part.setAttribute("role", role);
  const headers = headerTexts(table);
  for (const row of table.querySelectorAll("tbody tr, tfoot tr")) {
    let column = 0;
    for (const cell of row.cells) {
      if (cell.tagName === "TD" && !cell.dataset.label && cell.colSpan === 1 && headers[column]) cell.dataset.label = headers[column];
      column += cell.colSpan;
    }
  }
}

export function scan(root) {
  for (const table of root.querySelectorAll("table.stack")) restore(table);
  if (root.closest?.("table.stack")) restore(root.closest("table.stack"));
}
