#!/bin/sh
# Print every alert, and then its changes: examples/subscriber.sh; needs the nats command and jq.
#
# schemas/asyncapi.json describes the subject, schemas/alert.changed.json the data. The newest state
# of each alert comes first, because the stream keeps it; then come changes as they happen.
set -eu
nats --server "${NATS_URL:-nats://127.0.0.1:4222}" ${NATS_CREDS:+--creds "$NATS_CREDS"} \
    subscribe --stream MUSTER_ALERTS --last-per-subject --raw 'muster.alert.>' |
    jq --unbuffered --raw-output '.data | "\(.state) \(.severity) \(.kind) \(.node) \(.summary | @json)"'
