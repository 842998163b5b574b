// Boxes of a list's rows: "all on this page" ticks them, the form says how many are ticked. Without this module the box
// for all is read by the server.

function boxesOf(form) {
  return [...document.querySelectorAll(`input[type=checkbox][name=row][form="${form.id}"]`)];
}

function show(form) {
  const boxes = boxesOf(form);
  const ticked = boxes.filter((box) => box.checked).length;
  const all = form.querySelector("[data-select-all]");
  all.checked = ticked > 0 && ticked === boxes.length;
  all.indeterminate = ticked > 0 && ticked < boxes.length;
  form.querySelector("[data-selected]").textContent = ticked ? `${ticked} selected` : "";
  for (const box of boxes) box.closest("tr").classList.toggle("selected", box.checked);
}

export function start() {
  for (const form of document.querySelectorAll("form[data-selection]")) {
    let last = null;
    form.querySelector("[data-select-all]").addEventListener("change", (event) => {
      for (const box of boxesOf(form)) box.checked = event.target.checked;
      show(form);
    });
    document.addEventListener("click", (event) => {
      const box = event.target;
      if (box.name !== "row" || box.getAttribute("form") !== form.id) return;
      const boxes = boxesOf(form);
      // With shift: as the box that is ticked now, so those back to the one before.
      if (event.shiftKey && last) {
        const [from, to] = [boxes.indexOf(last), boxes.indexOf(box)].sort((a, b) => a - b);
        for (const between of boxes.slice(from, to + 1)) between.checked = box.checked;
      }
      last = box;
      show(form);
    });
    show(form);
    window.addEventListener("pageshow", () => show(form));
  }
}
