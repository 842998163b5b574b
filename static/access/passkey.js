// What a passkey's dialogue ended with when it gave nothing: said beside the button that opened it.
const SAID = {
  NotAllowedError: "Nothing was chosen, or it took too long. Try again.",
  InvalidStateError: "This device holds a passkey of yours already.",
  SecurityError: "Passkeys need https, or localhost.",
  NotSupportedError: "This browser cannot make such a passkey.",
};

document.addEventListener("allauth.error", (event) => {
  event.preventDefault();
  const button = document.getElementById("passkey") || document.getElementById("add");
  if (!button) return;
  let note = document.getElementById("passkey-note");
  if (!note) {
    note = document.createElement("p");
    note.id = "passkey-note";
    note.className = "note risk";
    note.setAttribute("role", "alert");
    button.closest("form").append(note);
  }
  note.textContent = SAID[event.detail.exception.name] || "The passkey was not taken. Reload the page and try again.";
});
