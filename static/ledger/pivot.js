/* Rows of a pivot open and close; closing a row closes what is under it. */

function close(row) {
  const button = row.querySelector(".toggle-row");
  if (button && button.getAttribute("aria-expanded") === "true") toggle(button);
}

function toggle(button) {
  const open = button.getAttribute("aria-expanded") !== "true";
  button.setAttribute("aria-expanded", String(open));
  for (const id of button.getAttribute("aria-controls").split(" ")) {
    const row = document.getElementById(id);
    if (!row) continue;
    if (!open) close(row);
    row.hidden = !open;
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".pivot .toggle-row");
  if (button) toggle(button);
});
