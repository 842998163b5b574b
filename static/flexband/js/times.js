// Turns <time datetime> written in UTC into the viewer's zone; UTC stays on hover. Finance pages opt out:
// a <time data-zone> was written in the billing zone, and so is everything under [data-fixed-zone].
const FORMS = {
  time: { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" },
  minute: { hour: "2-digit", minute: "2-digit", hourCycle: "h23" },
  date: { day: "numeric", month: "short", year: "numeric" },
  datetime: { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" },
};
const formats = Object.fromEntries(Object.entries(FORMS).map(([name, options]) => [name, new Intl.DateTimeFormat("en-GB", options)]));

/** Text of an instant in the viewer's zone; a dash when it cannot be read. */
export function local(value, form = "time") {
  const at = new Date(value);
  return Number.isNaN(at.getTime()) ? "—" : formats[form].format(at).replace(",", "");
}

/** `10 min 57 s` of whole seconds. */
export function words(seconds) {
  if (!Number.isFinite(seconds)) return "—";
  const s = Math.floor(seconds);
  for (const [unit, size, lower, part] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    if (s < size) continue;
    const rest = Math.floor((s % size) / part);
    return rest ? `${Math.floor(s / size)} ${unit} ${rest} ${lower}` : `${Math.floor(s / size)} ${unit}`;
  }
  return `${s} s`;
}

export function scan(root) {
  for (const element of root.querySelectorAll("time[datetime][data-form]")) {
    if (element.dataset.zone || element.closest("[data-fixed-zone]")) continue;
    element.textContent = local(element.dateTime, element.dataset.form);
    delete element.dataset.form;
  }
}
