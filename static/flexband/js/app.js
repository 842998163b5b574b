// Entry of every page: starts what works on plain markup. Pages load their own modules beside it.
import * as ages from "./ages.js";
import * as charts from "./charts.js";
import * as confirm from "./confirm.js";
import * as keys from "./keys.js";
import * as rows from "./rows.js";
import * as selection from "./selection.js";
import * as tables from "./tables.js";
import * as theme from "./theme.js";
import * as times from "./times.js";

function scan(root) {
  tables.scan(root);
  times.scan(root);
  charts.scan(root);
}

theme.start();
keys.start();
confirm.start();
rows.start();
selection.start();
scan(document);
ages.start();
document.addEventListener("htmx:load", (event) => scan(event.detail.elt));
const summary = document.querySelector("[data-error-summary]");
if (summary) summary.focus();
