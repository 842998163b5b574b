"""Pages of pools, slots and agents."""

from django.urls import path

from controlplane.fleet import views

urlpatterns = [
    path("pools/", views.pools, name="pools"),
    path("pools/new/", views.pool_new, name="pool-new"),
    path("pools/<slug:slug>/edit/", views.pool_edit, name="pool-edit"),
    path("pools/<slug:slug>/archive/", views.pool_archive, name="pool-archive"),
    path("pools/<slug:slug>/slots/new/", views.slot_new, name="slot-new"),
    path("pools/<slug:slug>/slots/<int:slot_id>/edit/", views.slot_edit, name="slot-edit"),
    path("pools/<slug:slug>/slots/<int:slot_id>/remove/", views.slot_remove, name="slot-remove"),
    path("agents/", views.agents, name="agents"),
    path("agents/enrol/", views.agent_enrol, name="agent-enrol"),
    path("agents/<int:agent_id>/", views.agent, name="agent"),
    path("agents/<int:agent_id>/approve/", views.agent_approve, name="agent-approve"),
    path("agents/<int:agent_id>/rotate-key/", views.agent_rotate_key, name="agent-rotate-key"),
    path("agents/<int:agent_id>/retire/", views.agent_retire, name="agent-retire"),
]
