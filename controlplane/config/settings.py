"""Settings from the environment; every variable is listed in docs/settings.md."""

import secrets
from pathlib import Path

import environ

from controlplane.access.provider_file import read_providers
from controlplane.web import csp, outbound

BASE_DIR = Path(__file__).resolve().parent.parent.parent
env = environ.Env()

VAR_DIR = Path(env.str("FLEXBAND_VAR", default=str(BASE_DIR / "var"))).resolve()


def _secret_key() -> str:
    """The secret from the environment or from a file (`FLEXBAND_SECRET_KEY_FILE`); never a default in production."""
    if file := env.str("FLEXBAND_SECRET_KEY_FILE", default=""):
        return Path(file).read_text(encoding="utf-8").strip()
    return env.str("FLEXBAND_SECRET_KEY", default="")


DEBUG = env.bool("FLEXBAND_DEBUG", default=False)
SECRET_KEY_IS_SET = bool(_secret_key())
# Without one each process makes its own: commands work, and what serves people is told by a check and the doctor.
SECRET_KEY = _secret_key() or secrets.token_urlsafe(50)
ALLOWED_HOSTS = env.list("FLEXBAND_ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = env.list("FLEXBAND_TRUSTED_ORIGINS", default=[])

# https everywhere but on loopback: `make demo` and the tests serve plain http on 127.0.0.1 and say so.
INSECURE_LOOPBACK = env.bool("FLEXBAND_INSECURE_LOOPBACK", default=False)
SECURE_SSL_REDIRECT = not INSECURE_LOOPBACK
SECURE_HSTS_SECONDS = 0 if INSECURE_LOOPBACK else 31_536_000
SECURE_HSTS_INCLUDE_SUBDOMAINS = not INSECURE_LOOPBACK
SECURE_HSTS_PRELOAD = not INSECURE_LOOPBACK
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]
if env.bool("FLEXBAND_BEHIND_TLS_PROXY", default=False):
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
SESSION_ENGINE = "controlplane.access.session_store"
SESSION_COOKIE_SECURE = not INSECURE_LOOPBACK
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 12 * 3600
CSRF_COOKIE_SECURE = not INSECURE_LOOPBACK
CSRF_COOKIE_HTTPONLY = True
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = csp.CONTENT_SECURITY_POLICY
CSRF_FAILURE_VIEW = "controlplane.web.views.csrf_failure"
DATA_UPLOAD_MAX_MEMORY_SIZE = 8 * 1024 * 1024
DATA_UPLOAD_MAX_NUMBER_FIELDS = 2_000

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.postgres",
    "channels",
    "rest_framework",
    "django_filters",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_htmx",
    "csp",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    "controlplane.audit",
    "controlplane.web",
    "controlplane.tenants",
    "controlplane.access",
    "controlplane.alerts",
    "controlplane.fleet",
    "controlplane.usage",
    "controlplane.ledger",
    "controlplane.contracts",
    "controlplane.budgets",
    "controlplane.jobs",
    "controlplane.policy",
    "controlplane.flex",
    "controlplane.exchange",
    "controlplane.live",
    "controlplane.experiments",
    "controlplane.operations",
    "controlplane.demo",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "controlplane.web.static_files.StaticFilesMiddleware",
    "controlplane.web.middleware.RequestIdMiddleware",
    "csp.middleware.CSPMiddleware",
    "controlplane.web.middleware.ZeroCharacterMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "controlplane.access.middleware.LastUseMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "controlplane.config.urls"
ASGI_APPLICATION = "controlplane.config.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": False,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "controlplane.web.context.shell",
            ],
            "loaders": [
                (
                    "django.template.loaders.cached.Loader",
                    [
                        "django.template.loaders.filesystem.Loader",
                        "django.template.loaders.app_directories.Loader",
                    ],
                )
            ],
        },
    }
]
# What the shell shows: a callable (request) -> dict with `organisation`, `role` and what navigation needs.
SHELL_CONTEXT = "controlplane.tenants.queries.shell_context"

# The application role; migrations connect as the owner (`DATABASE_OWNER_URL`), never the running system.
DATABASE_URL = env.str("DATABASE_URL", default="postgresql://flexband@127.0.0.1:5432/flexband")
DATABASE_OWNER_URL = env.str("DATABASE_OWNER_URL", default=DATABASE_URL)


def _database(url: str) -> dict:
    parsed = env.db_url_config(url.replace("postgresql://", "postgres://"))
    parsed["ENGINE"] = "django.db.backends.postgresql"
    parsed["CONN_MAX_AGE"] = 0
    parsed["ATOMIC_REQUESTS"] = False
    parsed.setdefault("OPTIONS", {})
    return parsed


DATABASES = {"default": _database(DATABASE_OWNER_URL if env.bool("FLEXBAND_AS_OWNER", default=False) else DATABASE_URL)}
if env.bool("FLEXBAND_DB_POOL", default=False):
    DATABASES["default"]["OPTIONS"]["pool"] = {"min_size": 1, "max_size": 16, "timeout": 10}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = env.str("REDIS_URL", default="redis://127.0.0.1:6379/0")
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": REDIS_URL, "KEY_PREFIX": "fb"}
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "fb"},
    }
}

CELERY_BROKER_URL = env.str("CELERY_BROKER_URL", default=REDIS_URL)
CELERY_BROKER_IS_REDIS = CELERY_BROKER_URL.startswith(("redis://", "rediss://"))
CELERY_TASK_IGNORE_RESULT = True
CELERY_RESULT_EXPIRES = None  # else beat sends a daily task that tidies up after results
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_TIME_LIMIT = 900
CELERY_TASK_DEFAULT_QUEUE = "flexband"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 2, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}
if CELERY_BROKER_IS_REDIS:
    # kombu's default redelivers work of a killed worker only after minutes; see docs/decisions.
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "visibility_timeout": 1_200,
        "unacked_restore_interval": 2,
        "unacked_restore_throttle": 1,
        "priority_steps": [0, 3, 6, 9],
        "queue_order_strategy": "priority",
        "global_keyprefix": "fb:",
    }
CELERY_BEAT_SCHEDULER = "controlplane.config.beat:Scheduler"
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "beat-schedule")
CELERY_BEAT_SCHEDULE = {
    "partitions-ahead": {"task": "usage.create_partitions", "schedule": 3_600.0},
    "fold-rollups": {"task": "usage.fold", "schedule": 15.0},
    "audit-duplicates": {"task": "usage.audit_duplicates", "schedule": 600.0},
    "retire-records": {"task": "usage.retire_records", "schedule": 3_600.0},
    "attribute-open-hours": {"task": "ledger.attribute_open", "schedule": 60.0},
    "post-charges": {"task": "ledger.post_charges", "schedule": 300.0},
    "settle-closed-months": {"task": "ledger.settle_closed", "schedule": 600.0},
    "fold-objectives": {"task": "contracts.fold_hours", "schedule": 60.0},
    "fold-balances": {"task": "ledger.fold_balances", "schedule": 60.0},
    "sweep-exports": {"task": "ledger.sweep_exports", "schedule": 60.0},
    "sweep-experiments": {"task": "experiments.sweep", "schedule": 10.0},
    "end-experiment-inputs": {"task": "experiments.end_inputs", "schedule": 3_600.0},
    "sweep-rollouts": {"task": "policy.sweep", "schedule": 5.0},
    "sweep-leases": {"task": "budgets.sweep", "schedule": 30.0},
    "keep-budget-forecasts": {"task": "budgets.keep_forecasts", "schedule": 300.0},
    "sweep-jobs": {"task": "jobs.sweep", "schedule": 5.0},
    "keep-job-files": {"task": "jobs.retention", "schedule": 3_600.0},
    "send-alerts": {"task": "alerts.send", "schedule": 5.0},
    "measure-batch-slots": {"task": "jobs.measure_efficiency", "schedule": 300.0},
}

# Signing keys: private halves are files that only worker and controller can read; rows hold the public halves.
SIGNING_KEY_DIR = Path(env.str("FLEXBAND_SIGNING_KEYS", default=str(VAR_DIR / "signing-keys")))
POLICY_ACCEPT_S = env.int("FLEXBAND_POLICY_ACCEPT_S", default=7 * 86_400)
SPOOL_AGE_LIMIT_S = 14 * 86_400
# Days of usage records older than that move into Parquet files; 0 keeps all of them in the database.
USAGE_RECORD_DAYS = env.int("FLEXBAND_USAGE_RECORD_DAYS", default=92)
USAGE_ARCHIVE = Path(env.str("FLEXBAND_USAGE_ARCHIVE", default=str(VAR_DIR / "usage-archive")))
# Inputs of experiments that are neither shared nor acted upon end that many days after the experiment; 0 keeps all.
EXPERIMENT_INPUT_DAYS = env.int("FLEXBAND_EXPERIMENT_INPUT_DAYS", default=400)
REPORT_BODY_LIMIT_BYTES = 8 * 1024 * 1024
# Files of batch jobs: a folder, or the address of an object store (s3://bucket/prefix) with its usual environment.
JOB_STORAGE = env.str("FLEXBAND_JOB_STORAGE", default=str(VAR_DIR / "job-files"))
JOB_FILE_LIMIT_BYTES = env.int("FLEXBAND_JOB_FILE_LIMIT_BYTES", default=2 * 1024**3)
JOB_FILE_DAYS = env.int("FLEXBAND_JOB_FILE_DAYS", default=30)
# Items and their results as rows, after their files were assembled.
JOB_ROW_DAYS = env.int("FLEXBAND_JOB_ROW_DAYS", default=7)
# Where agents listen for nudges (a broker user that reaches nothing else); empty: reports alone converge.
AGENT_BROKER_URL = env.str("FLEXBAND_AGENT_BROKER_URL", default="")
# How much of a hard budget's limit all agents together hold in advance for tenants whose outage posture is open.
OUTAGE_SLICE_PERCENT = env.int("FLEXBAND_OUTAGE_SLICE_PERCENT", default=5)
# Days for which the live pages can be looked at as they were, minute by minute; the last 48 h second by second.
HISTORY_DAYS = env.int("FLEXBAND_HISTORY_DAYS", default=92)
# Whether an enrolled agent waits for an admin's approval before it may say hello.
AGENT_APPROVAL = env.bool("FLEXBAND_AGENT_APPROVAL", default=False)

# Where people reach this installation, for links in messages; empty: messages carry paths only.
PUBLIC_URL = env.str("FLEXBAND_PUBLIC_URL", default="").rstrip("/")
# Ranges that webhooks may reach although they are not public, such as 10.20.0.0/16.
OUTBOUND_ALLOW = outbound.networks(env.list("FLEXBAND_OUTBOUND_ALLOW", default=[]))
# smtp://, smtp+tls:// (STARTTLS) or smtp+ssl://user:password@host:port; empty: e-mails are not sent and say so.
EMAIL_IS_SET = bool(env.str("FLEXBAND_SMTP_URL", default=""))
vars().update(env.email_url("FLEXBAND_SMTP_URL", default="smtp://localhost:25"))
DEFAULT_FROM_EMAIL = env.str("FLEXBAND_MAIL_FROM", default="flexband@localhost")

AUTH_USER_MODEL = "auth.User"
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "start"
LOGOUT_REDIRECT_URL = "login"

# Second factors and OpenID sign-in are django-allauth's, behind our own pages; nobody signs up.
ACCOUNT_ADAPTER = "controlplane.access.adapters.AccountAdapter"
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*"]
ACCOUNT_REAUTHENTICATION_TIMEOUT = 300
ACCOUNT_LOGIN_TIMEOUT = 600
MFA_ADAPTER = "controlplane.access.adapters.FactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_PASSKEY_LOGIN_ENABLED = True
MFA_RECOVERY_CODES_SHOW_ONCE = True
MFA_RECOVERY_CODE_DIGITS = 10
MFA_TOTP_TOLERANCE = 1
MFA_ALLOW_UNVERIFIED_EMAIL = True
SOCIALACCOUNT_ADAPTER = "controlplane.access.adapters.OpenIdAdapter"
# Roles that must sign in with a second factor, such as admin,finance.
SECOND_FACTOR_ROLES = frozenset(env.list("FLEXBAND_SECOND_FACTOR_ROLES", default=[]))
SECOND_FACTOR_PAGE = "account"
OPENID_PROVIDERS = read_providers(env.str("FLEXBAND_OIDC_PROVIDERS", default=""))

LANGUAGE_CODE = "en-gb"
USE_I18N = False
USE_TZ = True
TIME_ZONE = "UTC"

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATIC_ROOT = None  # files are served from where they are found, see WHITENOISE_USE_FINDERS
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.access.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.tenants.access.RolePermission"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.web.parsers.BoundedJSONParser"],
    "DEFAULT_SCHEMA_CLASS": "controlplane.web.openapi.RestSchema",
    "DEFAULT_FILTER_BACKENDS": [
        "django_filters.rest_framework.DjangoFilterBackend",
        "rest_framework.filters.OrderingFilter",
    ],
    "DEFAULT_PAGINATION_CLASS": "controlplane.web.cursor.CursorPages",
    "PAGE_SIZE": 50,
    "EXCEPTION_HANDLER": "controlplane.web.api.problem_json",
    "COERCE_DECIMAL_TO_STRING": True,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Flexband",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    # What only answers have is not asked for in a request: clients are made from the description.
    "COMPONENT_SPLIT_REQUEST": True,
    "ENFORCE_NON_BLANK_FIELDS": True,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    # Several nouns have a `state` or a `kind`: each list of choices has the name of its noun in the schema.
    "ENUM_NAME_OVERRIDES": {
        "LifecycleStateEnum": "controlplane.tenants.models.Tenant.State",
        "ApiKeyStateEnum": "controlplane.tenants.models.ApiKey.State",
        "AgentStateEnum": "controlplane.fleet.models.Agent.State",
        "JobStateEnum": "controlplane.jobs.models.Job.State",
        "ExperimentStateEnum": "controlplane.experiments.models.Experiment.State",
        "ExperimentKindEnum": "controlplane.experiments.models.Experiment.Kind",
        "EventKindEnum": "controlplane.alerts.actions.EVENT_KINDS",
        "ClassKindEnum": "controlplane.contracts.models.WorkloadClass.Kind",
        "RoleEnum": "controlplane.tenants.models.Member.Role",
    },
}


LOG_LEVEL = env.str("FLEXBAND_LOG_LEVEL", default="INFO")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(request_id)s %(message)s"}},
    "filters": {"request_id": {"()": "controlplane.web.log_lines.RequestIdFilter"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["request_id"]}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {"django.request": {"level": "ERROR"}, "uvicorn.access": {"level": "WARNING"}},
}
