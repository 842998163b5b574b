"""Pages of jobs, and the OpenAI form of files and batches."""

from django.urls import path

from controlplane.jobs import act_views, openai_api, submit_views, views

urlpatterns = [
    path("jobs/", views.jobs, name="jobs"),
    path("jobs/<uuid:job_uuid>/", views.job, name="job"),
    path("jobs/<uuid:job_uuid>/cancel/", act_views.job_cancel, name="job-cancel"),
    path("jobs/<uuid:job_uuid>/retry-parked/", act_views.job_retry, name="job-retry"),
    path("jobs/<uuid:job_uuid>/extend-deadline/", act_views.job_extend, name="job-extend"),
    path("jobs/<uuid:job_uuid>/files/<str:which>/", views.job_file, name="job-file"),
    path("jobs/new/", submit_views.job_new, name="job-new"),
    path("jobs/uploads/<uuid:batch_uuid>/", submit_views.job_upload, name="job-upload"),
    path("v1/files", openai_api.FilesView.as_view(), name="openai-files"),
    path("v1/files/<str:file_id>", openai_api.FileView.as_view(), name="openai-file"),
    path("v1/files/<str:file_id>/content", openai_api.FileContentView.as_view(), name="openai-file-content"),
    path("v1/batches", openai_api.BatchesView.as_view(), name="openai-batches"),
    path("v1/batches/<str:batch_id>", openai_api.BatchView.as_view(), name="openai-batch"),
    path("v1/batches/<str:batch_id>/cancel", openai_api.BatchCancelView.as_view(), name="openai-batch-cancel"),
]
