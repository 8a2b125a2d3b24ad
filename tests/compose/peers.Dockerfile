# Redis, HAProxy and Prometheus as Debian packages them, for machines without a container registry. A dashboard is not among them.
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server haproxy prometheus && rm -rf /var/lib/apt/lists/*
