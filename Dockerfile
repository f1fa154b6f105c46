# syntax=docker/dockerfile:1
FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make install VENV=/opt/artesian TARGET=.

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="Artesian" \
      org.opencontainers.image.description="An asyncio-native streaming LLM API server" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --create-home --uid 10001 artesian \
    && install --directory --owner=artesian /models
COPY --from=build /opt/artesian /opt/artesian
ENV PATH="/opt/artesian/bin:$PATH" \
    ARTESIAN_HOME=/models \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER artesian
WORKDIR /home/artesian
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["artesian"]
CMD ["serve", "--host", "0.0.0.0"]
