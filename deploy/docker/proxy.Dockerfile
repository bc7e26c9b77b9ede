# The proxy's image: no torch, no model code. Built by `make images`; the context is the repository's root.
# Where packages come from is the builder's business: ARGs below, or `make images IMAGE_BUILD_ARGS=...`.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
WORKDIR /build
# pip stays here: the venv that goes into the image has none. Bytecode is made to be valid whatever times its sources
# get, which layers round: in a read-only image it could not be made again.
RUN python3 -m venv pip && python3 -m venv --without-pip /opt/triptych
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN python3 requirements.py otel cert doctor top > requirements.txt \
  && pip/bin/pip --python /opt/triptych/bin/python install --no-cache-dir --no-compile -c constraints.txt -r requirements.txt \
  && /opt/triptych/bin/python -m compileall -q -f -j 0 --invalidation-mode unchecked-hash /opt/triptych/lib
COPY . .
RUN pip/bin/pip --python /opt/triptych/bin/python install --no-cache-dir --no-compile --no-deps . \
  && /opt/triptych/bin/python -m compileall -q -f -j 0 --invalidation-mode unchecked-hash /opt/triptych/lib/python3*/site-packages/triptych \
  && cp deploy/docker/healthcheck.py /opt/triptych/ \
  && echo 'triptych:x:65532:65532:triptych:/tmp:/usr/sbin/nologin' >> /etc/passwd \
  && echo 'triptych:x:65532:' >> /etc/group \
  && mkdir /certificates

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="triptych-proxy" \
      org.opencontainers.image.description="Triptych's proxy: OpenAI's API before encoder and PD workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build /opt/triptych /opt/triptych
# Where `triptych cert` may write: a volume that is mounted here first gets this folder's owner.
COPY --from=build --chown=65532:65532 /certificates /certificates
# The root file system may be read-only: what is written goes to /tmp.
ENV PATH=/opt/triptych/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TRIPTYCH_METRICS_PORT=9100
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000 8001 9100
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["/opt/triptych/bin/python", "-I", "/opt/triptych/healthcheck.py"]
ENTRYPOINT ["triptych"]
CMD ["proxy"]
