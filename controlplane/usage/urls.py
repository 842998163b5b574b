"""The page of usage that could not be counted."""

from django.urls import path

from controlplane.usage import views

urlpatterns = [path("finance/set-aside/", views.set_aside_page, name="set-aside")]
