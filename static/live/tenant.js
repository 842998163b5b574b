import { livePage } from "/static/live/page.js";

livePage(document.querySelector("[data-live-topic]").dataset.liveTopic);
