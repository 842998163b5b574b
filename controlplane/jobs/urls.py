"""Pages of jobs."""

from django.urls import path

from controlplane.jobs import views

urlpatterns = [
    path("jobs/", views.jobs, name="jobs"),
    path("jobs/<uuid:job_uuid>/", views.job, name="job"),
    path("jobs/<uuid:job_uuid>/cancel/", views.job_cancel, name="job-cancel"),
]
