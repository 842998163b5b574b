"""Addresses of signing in, one's own account and invitations. Names that begin with `account_`, `mfa_` and
`openid_connect_` are those that allauth asks for.
"""

from django.urls import path

from controlplane.access import account_views, factor_views, invitation_views, openid_views, sign_in_views

urlpatterns = [
    path("sign-in/", sign_in_views.sign_in, name="login"),
    path("sign-in/", sign_in_views.sign_in, name="account_login"),
    path("sign-out/", sign_in_views.sign_out, name="logout"),
    path("sign-in/second-factor/", sign_in_views.second_factor, name="mfa_authenticate"),
    path("sign-in/passkey/", sign_in_views.passkey_alone, name="mfa_login_webauthn"),
    path("sign-in/with/<slug:provider_id>/", openid_views.begin, name="openid_connect_login"),
    path("sign-in/with/<slug:provider_id>/back/", openid_views.back, name="openid_connect_callback"),
    path("invitation/<str:secret>/", invitation_views.invitation, name="invitation"),
    path("account/", account_views.account, name="account"),
    path("account/confirm/", sign_in_views.confirm_password, name="account_reauthenticate"),
    path("account/confirm/code/", sign_in_views.confirm_code, name="mfa_reauthenticate"),
    path("account/confirm/passkey/", sign_in_views.confirm_passkey, name="mfa_reauthenticate_webauthn"),
    path("account/confirm/sign-in/", sign_in_views.sign_in_again, name="sign-in-again"),
    path("account/app/add/", factor_views.app_add, name="mfa_activate_totp"),
    path("account/app/remove/", factor_views.app_remove, name="mfa_deactivate_totp"),
    path("account/passkeys/add/", factor_views.passkey_add, name="mfa_add_webauthn"),
    path("account/passkeys/<int:pk>/remove/", factor_views.passkey_remove, name="mfa_remove_webauthn"),
    path("account/recovery-codes/", factor_views.codes, name="mfa_view_recovery_codes"),
    path("account/recovery-codes/new/", factor_views.codes_new, name="mfa_generate_recovery_codes"),
    path("account/sessions/<uuid:public_id>/end/", account_views.session_end, name="session-end"),
    path("account/sessions/end-others/", account_views.sessions_end, name="sessions-end"),
    path("account/tokens/new/", account_views.token_new, name="token-new"),
    path("account/tokens/<int:token_id>/revoke/", account_views.token_revoke, name="token-revoke"),
    path("settings/invitations/", invitation_views.invitations, name="invitations"),
    path("settings/invitations/new/", invitation_views.invitation_new, name="invitation-new"),
    path(
        "settings/invitations/<int:invitation_id>/withdraw/",
        invitation_views.invitation_withdraw,
        name="invitation-withdraw",
    ),
    path("settings/members/<int:member_id>/access/", account_views.member_access, name="member-access"),
    path(
        "settings/members/<int:member_id>/access/sessions/end/",
        account_views.member_sessions_end,
        name="member-sessions-end",
    ),
    path(
        "settings/members/<int:member_id>/access/sessions/<uuid:public_id>/end/",
        account_views.member_session_end,
        name="member-session-end",
    ),
    path(
        "settings/members/<int:member_id>/access/factors/remove/",
        account_views.member_factors_remove,
        name="member-factors-remove",
    ),
    path(
        "settings/members/<int:member_id>/access/tokens/<int:token_id>/revoke/",
        account_views.member_token_revoke,
        name="member-token-revoke",
    ),
]
