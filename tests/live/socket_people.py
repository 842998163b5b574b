"""People with sessions that are committed: sockets read them from other threads."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.test import Client

from controlplane.access.models import Session
from controlplane.tenants.models import Member, Tenant


def sign_in(name, role, tenant=None):
    """A person's session key."""
    user = User.objects.create(username=f"socket-{name}", password="!")
    Member.objects.create(user=user, role=role, tenant=tenant)
    client = Client()
    client.force_login(user)
    return client.cookies["sessionid"].value


def sweep():
    """Takes away what such tests commit, also that of a run that was killed."""
    own = User.objects.filter(username__startswith="socket-")
    Member.objects.filter(user__in=own).delete()
    own.delete()
    Tenant.objects.filter(slug__startswith="socket-").delete()
    Session.objects.all().delete()
