// The browsable REST description. Writes need the CSRF token, which the page carries for htmx already. Modules and
// deferred scripts run in their order on the page, so the bundle is there when this one runs.
const place = document.getElementById("api-docs");
const headers = JSON.parse(document.body.getAttribute("hx-headers") || "{}");

window.SwaggerUIBundle({
  url: place.dataset.schema,
  domNode: place,
  deepLinking: true,
  docExpansion: "none",
  validatorUrl: null,
  requestInterceptor(request) {
    Object.assign(request.headers, headers);
    return request;
  },
});
