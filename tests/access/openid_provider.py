"""An OpenID provider as a process of its own: django-oauth-toolkit over SQLite, with people who behave and people who
do not. `python tests/access/openid_provider.py PORT FOLDER CALLBACK…`

Everybody's password is PASSWORD. `liar`'s id tokens carry another nonce than was asked for, `unverified`'s address is
not vouched for.
"""

import sys
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import django
from django.conf import settings

PASSWORD = "provider password 1"
CLIENT_ID, CLIENT_SECRET = "flexband", "client-secret-of-the-tests"
PEOPLE = ("ada", "unknown", "unverified", "liar", "invited")
FORM = '<form method="post">{% csrf_token %}{{ form.as_p }}<button name="allow" value="1">Go on</button></form>'
PAGES = {"registration/login.html": FORM, "oauth2_provider/authorize.html": f"<h1>Consent</h1>{FORM}"}


def configure(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    settings.configure(
        SECRET_KEY="provider", ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, USE_TZ=True, LOGIN_URL="/login/",
        SESSION_COOKIE_NAME="provider_session", CSRF_COOKIE_NAME="provider_csrf",
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "provider.sqlite3")}},
        INSTALLED_APPS=[
            "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions", "django.contrib.messages",
            "oauth2_provider",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "OPTIONS": {
                    "loaders": [("django.template.loaders.locmem.Loader", PAGES)],
                    "context_processors": ["django.template.context_processors.request"],
                },
            }
        ],
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True, "OIDC_RSA_PRIVATE_KEY": pem, "PKCE_REQUIRED": True,
            "OAUTH2_VALIDATOR_CLASS": f"{__name__}.Validator",
            "SCOPES": {"openid": "who you are", "profile": "your name", "email": "your address"},
            "ALLOWED_REDIRECT_URI_SCHEMES": ["http", "https"],
        },
    )  # fmt: skip
    django.setup()


def fill(callbacks: list[str]) -> None:
    from django.contrib.auth import get_user_model
    from django.core.management import call_command
    from oauth2_provider.models import Application

    call_command("migrate", verbosity=0)
    for name in PEOPLE:
        get_user_model().objects.create_user(name, f"{name}@example.com", PASSWORD)
    Application.objects.create(
        name="Flexband", client_id=CLIENT_ID, client_secret=CLIENT_SECRET, client_type="confidential",
        authorization_grant_type="authorization-code", redirect_uris=" ".join(callbacks), algorithm="RS256",
    )  # fmt: skip


class Quiet(WSGIRequestHandler):
    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    configure(Path(sys.argv[2]))
    fill(sys.argv[3:])
    from django.contrib.auth.views import LoginView
    from django.core.wsgi import get_wsgi_application
    from django.urls import include, path
    from oauth2_provider import urls as oauth2_urls
    from oauth2_provider.oauth2_validators import OAuth2Validator

    class Validator(OAuth2Validator):
        def get_additional_claims(self, request):
            name = request.user.username
            return {"email": request.user.email, "email_verified": name != "unverified", "name": name.title()}

        def get_authorization_code_nonce(self, client_id, code, redirect_uri, request):
            found = super().get_authorization_code_nonce(client_id, code, redirect_uri, request)
            return "another" if request.user.username == "liar" else found

    urlpatterns = [path("login/", LoginView.as_view()), path("o/", include(oauth2_urls))]
    server = make_server("127.0.0.1", int(sys.argv[1]), get_wsgi_application(), handler_class=Quiet)
    print("ready", flush=True)
    server.serve_forever()
