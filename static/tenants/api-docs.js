// The browsable REST description. Writes need the CSRF token, which the page carries for htmx already.
const place = document.getElementById("api-docs");
const headers = JSON.parse(document.body.getAttribute("hx-headers") || "{}");

window.addEventListener("DOMContentLoaded", show);
if (document.readyState !== "loading") show();

let shown = false;
function show() {
  if (shown || !window.SwaggerUIBundle) return;
  shown = true;
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
}
