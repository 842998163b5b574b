"""Log lines carry the id of the request they belong to: the one that error pages and problem documents show."""

import logging

import structlog


class RequestIdFilter(logging.Filter):
    """Sets `request_id` on every record: a dash outside of requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = structlog.contextvars.get_contextvars().get("request_id", "-")
        return True
