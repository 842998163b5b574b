"""The content security policy, one dict for django-csp 4 (the same keys Django 6 has built in).

No inline script at all. Plotly's one global style element carries the nonce; style *attributes* are
allowed because bar lengths are written as custom properties (`style="--v:71%"`).
`connect-src 'self'` covers the own host's ws and wss too (CSP 3; every browser that has light-dark() does).
"""

from csp.constants import NONCE, NONE, SELF

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        "style-src": [SELF, NONCE],
        "style-src-attr": ["'unsafe-inline'"],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        "connect-src": [SELF],
        "object-src": [NONE],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
        "form-action": [SELF],
    }
}
