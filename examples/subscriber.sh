#!/bin/sh
# Print every alert, and then its changes: examples/subscriber.sh; needs the nats command and jq.
#
# schemas/asyncapi.json describes the subject, schemas/alert.changed.json the data. The newest state
# of each alert comes first, because the stream keeps it; then come changes as they happen. An outage
# of NATS ends it with an error.
#
# As the reader NAME (muster auth reader --name NAME --out FILE), set NATS_CREDS=FILE,
# NATS_DOMAIN=muster and NATS_INBOX_PREFIX=_INBOX.reader_NAME.
set -eu
api="\$JS.${NATS_DOMAIN:+$NATS_DOMAIN.}API.CONSUMER"

request() {
    nats --server "${NATS_URL:-nats://127.0.0.1:4222}" ${NATS_CREDS:+--creds "$NATS_CREDS"} \
        --inbox-prefix "${NATS_INBOX_PREFIX:-_INBOX}" --timeout 35s request --raw "$@"
}

# a reader may only pull messages, through a consumer that the server names
consumer=$(request "$api.CREATE.MUSTER_ALERTS" '{"stream_name": "MUSTER_ALERTS", "config": {
    "filter_subject": "muster.alert.>", "deliver_policy": "last_per_subject",
    "ack_policy": "none", "inactive_threshold": 60000000000}}' |
    jq --raw-output '.name // error(.error.description)')
: "${consumer:?NATS gave no consumer}"

# each answer is one message, or "nil body" after 30 s; durations are in nanoseconds
alerts() {
    while answer=$(request "$api.MSG.NEXT.MUSTER_ALERTS.$consumer" '{"expires": 30000000000}') &&
        [ -n "$answer" ]; do
        [ "$answer" = "nil body" ] || printf '%s\n' "$answer"
    done
    echo '{"error": "NATS does not answer"}'
}

alerts | jq --unbuffered --raw-output 'if .error then error(.error) else .data |
    "\(.state) \(.severity) \(.kind) \(.node) \(.summary | @json)" end'
