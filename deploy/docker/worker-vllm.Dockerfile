# The image of vLLM with Triptych's connector, for PD pools with `engine: vllm`: vLLM's own, with our package beside it.
# Built by `make images IMAGES=worker-vllm`; the context is the repository's root. It has not been built yet.
ARG VLLM=docker.io/vllm/vllm-openai:v0.32.0

FROM ${VLLM}
ARG PIP_INDEX_URL
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="triptych-worker-vllm" \
      org.opencontainers.image.description="vLLM with Triptych's EC connector" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /build
# What the connector needs and vLLM lacks; --no-deps: vLLM's own packages stay as they are.
COPY constraints.txt ./
RUN python3 -m pip install --no-cache-dir --no-deps -c constraints.txt \
  msgpack redis hiredis xxhash blake3 grpcio-health-checking
COPY . .
RUN python3 -m pip install --no-cache-dir --no-deps . \
  && cd / && rm -rf /build \
  && python3 -c 'import triptych.integrations.vllm'
ENV HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["vllm"]
CMD ["--help"]
