"""Addresses of sign-in, tenants' forms, keys, people, audit and the REST description."""

from django.urls import path

from controlplane.tenants import account_views, audit_views, bulk_views, description, key_views, member_views, views

urlpatterns = [
    path("account/password/", account_views.password, name="password"),
    path("tenant-names/", views.tenant_names, name="tenant-names"),
    path("tenants/new/", views.tenant_new, name="tenant-new"),
    path("tenants/<slug:slug>/edit/", views.tenant_edit, name="tenant-edit"),
    path("tenants/<slug:slug>/archive/", views.tenant_archive, name="tenant-archive"),
    path("tenants/<slug:slug>/keys/new/", key_views.key_new, name="key-new"),
    path("bulk/tenants/", bulk_views.tenants, name="tenants-bulk"),
    path("bulk/keys/", bulk_views.keys, name="keys-bulk"),
    path("bulk/members/", bulk_views.members, name="members-bulk"),
    path("keys/", key_views.keys, name="api-keys"),
    path("keys/<slug:public_id>/edit/", key_views.key_edit, name="key-edit"),
    path("keys/<slug:public_id>/rotate/", key_views.key_rotate, name="key-rotate"),
    path("keys/<slug:public_id>/revoke/", key_views.key_revoke, name="key-revoke"),
    path("settings/", member_views.settings_page, name="settings"),
    path("settings/roles/", member_views.roles, name="roles"),
    path("settings/members/", member_views.members, name="members"),
    path("settings/members/new/", member_views.member_new, name="member-new"),
    path("settings/members/<int:member_id>/edit/", member_views.member_edit, name="member-edit"),
    path("settings/members/<int:member_id>/password/", member_views.member_password, name="member-password"),
    path("settings/members/<int:member_id>/remove/", member_views.member_remove, name="member-remove"),
    path("audit/", audit_views.audit, name="audit"),
    path("audit/<int:entry_id>/", audit_views.audit_entry, name="audit-entry"),
    path("api/schema/", description.schema, name="api-schema"),
    path("api/docs/", description.docs, name="api-docs"),
]
