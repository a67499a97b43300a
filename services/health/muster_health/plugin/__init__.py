"""Tracks one plugin on one node, from its heartbeats to its verdict and its alerts.

`tracked_plugin` combines `liveness`, `self_reported` (with `problems`), `verdict_machine` (with
`verdict_state`, `investigation` and `diagnosis`) and `device_counts`. Silence alone never leads to
a verdict: the plugin is first checked, with a probe and a query to Kubernetes.

| state       | event                                     | next state  | verdict            |
|-------------|-------------------------------------------|-------------|--------------------|
| UNKNOWN     | a good heartbeat                          | HEALTHY     | HEALTHY            |
| UNKNOWN     | expected, but no heartbeat in time        | SUSPECT     | check: absence     |
| HEALTHY (1) | an event reports a lost registration      | unchanged   | check after grace  |
| all but (2) | no heartbeat for 2.5 intervals (3)        | SUSPECT     | check: silence     |
| all but (2) | connection closed without announced stop  | SUSPECT     | check after 2 s    |
| all but (2) | a heartbeat with a problem                | unchanged   | check after grace  |
| all but (2) | the same problem after its grace (5)      | FAILING     | see `problems`     |
| HEALTHY     | too many unannounced new instances (7)    | RECOVERING  | FLAPPING           |
| SUSPECT     | an answer to the probe, a fresh heartbeat | as before   | as before: refuted |
| SUSPECT     | problem: the probe's answer confirms it   | FAILING     | see `problems`     |
| SUSPECT     | silence: all results have arrived         | LOST (4)    | see `diagnosis`    |
| SUSPECT     | silence: the probe is inconclusive (8)    | SUSPECT     | probe after 1 s    |
| SUSPECT     | silence: inconclusive for the fourth time | as before   | all waits restart  |
| SUSPECT     | problem: no answer, or nothing conclusive | as before   | as before          |
| SUSPECT     | the plugins of many nodes fail alike (6)  | SUSPECT     | suspended          |
| LOST        | 20 s, 40 s, ... 2 min later               | LOST (4)    | checked again      |
| LOST        | a fresh heartbeat, an answer to a probe   | RECOVERING  | as before          |
| FAILING     | a good heartbeat                          | RECOVERING  | as before          |
| RECOVERING  | 3 good heartbeats, or 15 s; `flap_damping`| HEALTHY     | HEALTHY            |
| any         | the plugin announces a stop               | MAINTENANCE | MAINTENANCE        |
| MAINTENANCE | a new instance, or the plugin has started | RECOVERING  | as before          |
| MAINTENANCE | the plugin is not back in time            | MAINTENANCE | as before: overdue |
| any         | our own connection to NATS was lost       | as before   | all waits restart  |
| any         | our own process was suspended             | as before   | all waits grow     |

(1) Also UNKNOWN and RECOVERING. (2) Not SUSPECT, LOST or MAINTENANCE, which wait for answers, a
heartbeat or the plugin's return. (3) The plugin declares its interval; our clock measures it,
except while we can receive nothing. (4) MAINTENANCE, if the results show that the silence was
planned. (5) For some problems Kubernetes is then asked once more what the node offers, and the
answer decides. (6) For a limited time: `fleet.mass_failure` has the table. If many share a problem,
no verdict about it is reached either; their states do not change. (7) See the next table. (8) NATS
did not answer health itself in time, so the plugin's silence proves nothing.

Besides its verdict, a plugin can be marked as flapping:

| event                                            | mark      | verdict                |
|--------------------------------------------------|-----------|------------------------|
| the first or second failure within 10 min        | none      | the failure's          |
| the third failure within 10 min, or a later one  | flapping  | the failure's          |
| the same, but it is only another new process     | flapping  | FLAPPING               |
| the failure changes, or was diagnosed wrongly    | as before | the new one            |
| the plugin is back: RECOVERING                   | as before | as before              |
| the plugin is HEALTHY again, or stops as planned | none      | HEALTHY or MAINTENANCE |

A heartbeat that was delayed in a backlog (`liveness.Freshness.DOUBTFUL`) neither refutes a
suspicion of silence nor counts as good.
"""
