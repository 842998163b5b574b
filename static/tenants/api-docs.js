// The browsable REST description. Writes need the CSRF token, which the page carries for htmx already. Modules and
// deferred scripts run in their order on the page, so the bundle is there when this one runs.
const place = document.getElementById("api-docs");
const headers = JSON.parse(document.body.getAttribute("hx-headers") || "{}");
const LEVELS = { "h3.opblock-tag": "2", ".models > h4": "2", "h4.opblock-title": "3" };

// Swagger's own frame is a whole page with a title, a main part and a sign-in; here it is a part of ours.
function insideOurs({ React }) {
  const Inside = ({ getComponent }) =>
    React.createElement(
      "div",
      { className: "swagger-ui" },
      ["SvgAssets", "operations", "Models"].map((name) =>
        React.createElement(getComponent(name, name !== "SvgAssets"), { key: name }),
      ),
    );
  return { components: { Inside } };
}

function levelTitles() {
  for (const [titles, level] of Object.entries(LEVELS)) {
    for (const title of place.querySelectorAll(titles)) title.setAttribute("aria-level", level);
  }
}

window.SwaggerUIBundle({
  url: place.dataset.schema,
  domNode: place,
  deepLinking: true,
  docExpansion: "none",
  validatorUrl: null,
  plugins: [insideOurs],
  layout: "Inside",
  requestInterceptor(request) {
    Object.assign(request.headers, headers);
    return request;
  },
  onComplete() {
    levelTitles();
    new MutationObserver(levelTitles).observe(place, { childList: true, subtree: true });
    place.dataset.ready = "1";
  },
});
