"""Tracks one plugin on one node, from its heartbeats to its verdict and its alerts.

`tracked_plugin` is the machine; it is made of `liveness`, `self_reported` (with `problems`),
`verdict` (with `verdict_state`, `investigation` and `diagnosis`) and `device_counts`. A verdict
needs evidence from two sides: silence alone raises a question, never an alarm.

| state       | what comes                                    | then        | verdict              |
|-------------|-----------------------------------------------|-------------|----------------------|
| UNKNOWN     | a good heartbeat                              | HEALTHY     | HEALTHY              |
| UNKNOWN     | expected, and not heard in its time           | SUSPECT     | ask: absence         |
| HEALTHY (1) | an event reports a lost registration          | itself      | ask after the grace  |
| all but (2) | no heartbeat for 2.5 intervals (3)            | SUSPECT     | ask: silence         |
| all but (2) | its connection ends, and it announced no stop | SUSPECT     | ask after 2 s        |
| all but (2) | a heartbeat with a problem                    | itself      | ask after the grace  |
| all but (2) | a problem, and again after the grace (5)      | ILL         | see `problems`       |
| HEALTHY     | another instance, unannounced, often (7)      | RECOVERING  | FLAPPING             |
| SUSPECT     | the probe is answered, or a fresh heartbeat   | as before   | as before: refuted   |
| SUSPECT     | problem: the answer shows it too              | ILL         | see `problems`       |
| SUSPECT     | silence: all that were asked have answered    | LOST (4)    | see `diagnosis`      |
| SUSPECT     | problem: no answer; or nothing can be said    | as before   | as before            |
| SUSPECT     | many are suspect at once (6)                  | SUSPECT     | suspended            |
| LOST        | 20 s, 40 s, ... 2 min later                   | LOST (4)    | asked again: refined |
| LOST        | a fresh heartbeat, or an answer               | RECOVERING  | as before            |
| ILL         | a good heartbeat                              | RECOVERING  | as before            |
| RECOVERING  | 3 good heartbeats, or 15 s; `FlapDamping`     | HEALTHY     | HEALTHY              |
| any         | it announces its stop                         | MAINTENANCE | MAINTENANCE          |
| MAINTENANCE | a heartbeat of another instance, or new start | RECOVERING  | as before            |
| MAINTENANCE | not back in time                              | MAINTENANCE | as before: overdue   |
| any         | our own link to NATS was gone                 | as before   | waits start anew     |
| any         | our own process was suspended                 | as before   | waits are longer     |

(1) UNKNOWN and RECOVERING too. (2) SUSPECT waits for its answer, LOST for a heartbeat, MAINTENANCE
for a return. (3) As the plugin declares them, by our clock, not counting the time in which nothing
could be heard. (4) MAINTENANCE, if the answers show that its silence was planned. (5) Kubernetes is
asked once more what the node offers, and its answer counts. (6) With a problem that many may share,
too: then it stays what it is, and the problem is not believed meanwhile. (7) The mark below.

Beside the verdict stands a mark:

| what comes                                            | the mark  | the verdict            |
|-------------------------------------------------------|-----------|------------------------|
| a failure; with it fewer than three within 10 min     | none      | what is wrong          |
| a failure; with it three or more                      | flapping  | what is wrong          |
| the same, and it is only that another process came    | flapping  | FLAPPING               |
| what is wrong is, or turns out to be, something else  | as before | that, at once          |
| it is back: RECOVERING                                | as before | as before              |
| it is HEALTHY again, or stops as planned              | none      | HEALTHY or MAINTENANCE |

A heartbeat out of a backlog (`liveness.Freshness.DOUBTFUL`) neither refutes a suspicion of silence
nor counts as good.
"""
