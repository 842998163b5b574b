# One image for every process; docker-compose.yml says which command each runs.
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 FLEXBAND_VAR=/var/lib/flexband
WORKDIR /srv/flexband
COPY requirements/runtime.txt requirements/runtime.txt
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements/runtime.txt
COPY manage.py pyproject.toml ./
COPY controlplane controlplane
COPY templates templates
COPY static static
RUN useradd --system --create-home --home-dir /var/lib/flexband flexband
# volumes take the owner of the folder they are mounted on
RUN install -d -o flexband -g flexband /var/lib/flexband/job-files
USER flexband
EXPOSE 8000
CMD ["python", "-m", "uvicorn", "controlplane.config.asgi:application", "--http", "controlplane.config.asgi:HttpProtocol", "--host", "0.0.0.0", "--port", "8000", "--ws", "controlplane.config.asgi:WebSocketProtocol", "--no-access-log"]
