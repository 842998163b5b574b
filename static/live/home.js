import { update } from "/static/flexband/js/charts.js";
import { livePage } from "/static/live/page.js";

livePage("fleet", (state, before) => {
  if (state.burn_figure && state.burn_figure !== before?.burn_figure) update("burn", state.burn_figure.data, state.burn_figure.layout);
});
