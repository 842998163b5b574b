"""Who a provider's answer stands for: every case of the table in docs/sign-in.md, without the network."""

import threading
import time

import pytest
from allauth.account.models import EmailAddress
from allauth.socialaccount.models import SocialAccount, SocialLogin
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.utils import timezone

from controlplane.access.invitation_actions import invite
from controlplane.access.linking import NotAdmitted, person_behind
from controlplane.access.models import Invitation
from controlplane.access.provider_file import OpenIdProvider
from controlplane.audit.actors import Actor
from controlplane.tenants.member_actions import remove_member
from controlplane.tenants.models import Member
from tests.access.walking import person

pytestmark = pytest.mark.django_db
ACTOR = Actor(id=None, name="admin", role="admin")


@pytest.fixture(autouse=True)
def provider(settings, installation):
    settings.OPENID_PROVIDERS = (OpenIdProvider("work", "Work", "https://login.example.com", "flexband", "secret"),)


def comes(email, *, subject="1", verified=True, account=None):
    account = account or SocialAccount(provider="work", uid=subject, extra_data={"name": "Grace H"})
    return SocialLogin(account=account, email_addresses=[EmailAddress(email=email, verified=verified, primary=True)])


def test_an_address_in_other_letters_is_the_same_member():
    ada = person("ada")
    assert person_behind(comes("ADA@Example.com")) == ada
    link = SocialAccount.objects.get()
    assert (link.user, link.uid) == (ada, "1")


def test_a_link_counts_whatever_the_address_is_by_now_but_not_for_who_was_removed():
    ada = person("ada")
    person_behind(comes("ada@example.com"))
    link = SocialAccount.objects.get()
    assert person_behind(comes("other@example.com", verified=False, account=link)) == ada
    remove_member(member_id=ada.member.pk, actor=ACTOR, now=timezone.now())
    link = SocialAccount.objects.get()
    with pytest.raises(NotAdmitted, match="no longer a member"):
        person_behind(comes("ada@example.com", account=link))
    with pytest.raises(NotAdmitted, match="No member has"):
        person_behind(comes("ada@example.com", subject="2"))


def test_two_members_with_one_address_are_nobody():
    for name in ("ada", "eve"):
        person(name)
    User.objects.update(email="shared@example.com")
    with pytest.raises(NotAdmitted, match="Several members"):
        person_behind(comes("shared@example.com"))
    assert not SocialAccount.objects.exists()


def test_an_address_that_is_not_vouched_for_is_nobody():
    person("ada")
    with pytest.raises(NotAdmitted, match="does not vouch"):
        person_behind(comes("ada@example.com", verified=False))


def test_an_invitation_is_taken_once():
    invite(email="grace@example.com", role="finance", tenant_id=None, days=1, actor=ACTOR, now=timezone.now())
    user = person_behind(comes("Grace@example.com"))
    assert user.member.role == "finance" and not user.has_usable_password()
    user.member.delete()
    with pytest.raises(NotAdmitted):
        person_behind(comes("Grace@example.com", subject="2"))


def test_unknown_people_become_members_only_where_the_entry_says_so(settings):
    with pytest.raises(NotAdmitted, match="Ask an administrator"):
        person_behind(comes("new@example.com"))
    assert not User.objects.exists()
    (one,) = settings.OPENID_PROVIDERS
    settings.OPENID_PROVIDERS = (OpenIdProvider(one.id, one.name, one.issuer, one.client_id, "secret", "viewer"),)
    user = person_behind(comes("new@example.com"))
    assert (user.member.role, user.first_name) == ("viewer", "Grace H")


@pytest.mark.parametrize(("member", "alike"), [("admin", "adm\u0131n@example.com"), ("sam", "\u017fam@example.com")])
def test_an_address_that_only_the_database_takes_for_the_same_is_somebody_else(member, alike):
    person(member, "admin")
    with pytest.raises(NotAdmitted, match="No member has"):
        person_behind(comes(alike))
    invite(email="ivi@example.com", role="admin", tenant_id=None, days=1, actor=ACTOR, now=timezone.now())
    with pytest.raises(NotAdmitted, match="No member has"):
        person_behind(comes("\u0131vi@example.com"))
    assert not SocialAccount.objects.exists()


def test_an_address_that_is_no_name_to_sign_in_with_is_told():
    person("taken@example.com")
    for email in ("o'brien@example.com", "taken@example.com"):
        invite(email=email, role="viewer", tenant_id=None, days=1, actor=ACTOR, now=timezone.now())
        with pytest.raises(NotAdmitted, match="cannot become a member"):
            person_behind(comes(email))
    long = f"{'x' * 60}@{'y' * 40}.example.com"
    invite(email=long, role="viewer", tenant_id=None, days=1, actor=ACTOR, now=timezone.now())
    assert person_behind(comes(long)).member.role == "viewer"


@pytest.mark.django_db(transaction=True)
def test_an_invitation_whose_link_is_taken_meanwhile_makes_no_second_member():
    issued = invite(email="grace@example.com", role="finance", tenant_id=None, days=1, actor=ACTOR, now=timezone.now())
    refused = []

    def by_provider():
        try:
            person_behind(comes("grace@example.com"))
        except NotAdmitted as error:
            refused.append(error)
        finally:
            connection.close()

    with transaction.atomic():
        Invitation.objects.select_for_update().get(pk=issued.invitation.pk)
        thread = threading.Thread(target=by_provider)
        thread.start()
        time.sleep(0.5)
        Invitation.objects.filter(pk=issued.invitation.pk).update(withdrawn_at=timezone.now())
    thread.join()
    assert refused and not Member.objects.filter(role="finance").exists()
