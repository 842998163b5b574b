// Dialogs that ask before something is done: [data-open-dialog="id"] opens, [data-close-dialog] closes.
// A submitted form says its verb is under way and cannot be sent twice.
export function start() {
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open-dialog]");
    if (opener) document.getElementById(opener.dataset.openDialog)?.showModal();
    if (event.target.closest("[data-close-dialog]")) event.target.closest("dialog").close();
    const copier = event.target.closest("[data-copy]");
    if (copier) copy(copier);
  });
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method !== "post" || event.defaultPrevented) return;
    if (form.dataset.sent) return event.preventDefault();
    form.dataset.sent = "1";
    event.submitter?.setAttribute("aria-busy", "true");
  });
  window.addEventListener("pageshow", () => {
    for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
    for (const button of document.querySelectorAll("button[aria-busy]")) button.removeAttribute("aria-busy");
  });
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  if (!source) return;
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(source.textContent.trim());
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    button.textContent = "Selected, press Ctrl+C";
  }
  setTimeout(() => (button.textContent = said), 3000);
}
