BEGIN TRANSACTION;
CREATE TABLE attempt (
    namespace TEXT NOT NULL, job TEXT NOT NULL, slot INTEGER NOT NULL, attempt INTEGER NOT NULL,
    token TEXT NOT NULL, fence INTEGER NOT NULL, instance_id TEXT NOT NULL,
    incarnation TEXT NOT NULL, cause TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    claimed_at INTEGER NOT NULL, started_at INTEGER, ended_at INTEGER,
    failure TEXT, result TEXT NOT NULL,
    PRIMARY KEY (namespace, job, slot, attempt)
) STRICT
;
INSERT INTO "attempt" VALUES('default','job',1800000010000,1,'inc-1-1',1800000010000000,'host:1','inc-1','claim','success','',1800000010000,1800000010000,1800000010000,NULL,'done');
INSERT INTO "attempt" VALUES('default','job',1800000020000,1,'inc-1-2',1800000020000000,'host:1','inc-1','claim','failed','',1800000020000,1800000020000,1800000020000,'{"type": "ValueError", "message": "no", "stack_trace": "trace", "permanent": false, "retry_after_ms": null}','');
INSERT INTO "attempt" VALUES('default','job',1800000030000,1,'inc-2-1',1800000030000000,'host:2','inc-2','claim','interrupted','runner_lost',1800000030000,1800000030000,1800000030000,NULL,'');
INSERT INTO "attempt" VALUES('default','job',1800000030000,2,'inc-1-4',1800000040000000,'host:1','inc-1','takeover','claimed','',1800000040000,NULL,NULL,NULL,'');
CREATE TABLE definition (
    namespace TEXT NOT NULL, job TEXT NOT NULL, definition_id TEXT NOT NULL,
    schedule_id TEXT NOT NULL, window_ms INTEGER NOT NULL, held_at INTEGER NOT NULL,
    spec TEXT NOT NULL,
    PRIMARY KEY (namespace, job, definition_id)
) STRICT;
INSERT INTO "definition" VALUES('default','job','8745e6d61def71d1ef21c1903eaf4b33','every:10s',86400000,1800000000000,'{"by_name":false,"cancel_grace_ms":null,"catch_up":null,"catch_up_limit":0,"catch_up_window_ms":null,"concurrency":0,"heartbeat_ms":null,"jitter_ms":null,"labels":[],"lease_ms":null,"max_attempts":0,"name":"job","overlap":null,"retry":null,"schedule":{"offset_ms":0,"period_ms":10000},"start_deadline_ms":null,"stop_grace_ms":null,"timeout_ms":null}');
CREATE TABLE freed (namespace TEXT PRIMARY KEY, times INTEGER NOT NULL) STRICT;
INSERT INTO "freed" VALUES('default',1);
CREATE TABLE hold (
    namespace TEXT NOT NULL, incarnation TEXT NOT NULL, job TEXT NOT NULL,
    definition_id TEXT NOT NULL, schedule_id TEXT NOT NULL,
    PRIMARY KEY (namespace, job, incarnation, definition_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "hold" VALUES('default','inc-1','job','8745e6d61def71d1ef21c1903eaf4b33','every:10s');
INSERT INTO "hold" VALUES('default','inc-2','job','8745e6d61def71d1ef21c1903eaf4b33','every:10s');
CREATE TABLE instance (
    namespace TEXT NOT NULL, incarnation TEXT NOT NULL, registered INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (namespace, incarnation)
) STRICT;
INSERT INTO "instance" VALUES('default','inc-2',1,'{"instance_id": "host:2", "incarnation": "inc-2", "state": "idle", "version": "", "backend": "", "tzdata_version": "", "started_at": 0, "seen_at": 1800000030000, "clock_offset_ms": 0, "lease_ms": 30000, "running": 0, "ready": false, "reasons": [], "doubts": [], "outlook_at": 0, "outlook": []}');
INSERT INTO "instance" VALUES('default','inc-1',1,'{"instance_id": "host:1", "incarnation": "inc-1", "state": "idle", "version": "", "backend": "", "tzdata_version": "", "started_at": 0, "seen_at": 1800000040000, "clock_offset_ms": 0, "lease_ms": 30000, "running": 0, "ready": false, "reasons": [], "doubts": [], "outlook_at": 0, "outlook": []}');
CREATE TABLE job (
    namespace TEXT NOT NULL, job TEXT NOT NULL, floor INTEGER NOT NULL, fence INTEGER NOT NULL,
    definition_id TEXT NOT NULL, schedule_id TEXT NOT NULL, definition_at INTEGER NOT NULL,
    PRIMARY KEY (namespace, job)
) STRICT, WITHOUT ROWID;
INSERT INTO "job" VALUES('default','job',-1,1800000040000000,'8745e6d61def71d1ef21c1903eaf4b33','every:10s',1800000000000);
CREATE TABLE meta (store_id TEXT NOT NULL) STRICT;
INSERT INTO "meta" VALUES('f0d6dcf8c6aba1fab3babc1131ac05b0');
CREATE TABLE run (
    namespace TEXT NOT NULL, job TEXT NOT NULL, slot INTEGER NOT NULL, "trigger" TEXT NOT NULL,
    state TEXT NOT NULL, final INTEGER NOT NULL, reason TEXT NOT NULL, attempt INTEGER NOT NULL,
    lease_until INTEGER, lease_length_ms INTEGER, lease_end_at INTEGER, lease_boot_id TEXT,
    freed TEXT NOT NULL, lost INTEGER NOT NULL, failed INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL, window_ms INTEGER NOT NULL,
    cancel TEXT, cancelled_at INTEGER NOT NULL, cancel_grace_ms INTEGER NOT NULL,
    blocking_slot INTEGER NOT NULL, slots_covered INTEGER NOT NULL, ended_at INTEGER,
    PRIMARY KEY (namespace, job, slot)
) STRICT, WITHOUT ROWID;
INSERT INTO "run" VALUES('default','job',1800000010000,'schedule','success',1,'',1,NULL,NULL,NULL,NULL,'',0,0,3,86400000,NULL,0,5000,0,0,1800000010000);
INSERT INTO "run" VALUES('default','job',1800000020000,'schedule','failed',1,'',1,NULL,NULL,NULL,NULL,'',0,1,3,86400000,NULL,0,5000,0,0,1800000020000);
INSERT INTO "run" VALUES('default','job',1800000030000,'schedule','claimed',0,'',2,75000,30000,1800000070000,'boot-1','',1,0,3,86400000,NULL,0,5000,0,0,NULL);
INSERT INTO "run" VALUES('default','job',1800000040000,'schedule','skipped',1,'overlap',0,NULL,NULL,NULL,NULL,'',0,0,0,0,NULL,0,0,1800000030000,0,1800000040000);
CREATE TABLE schedule (
    namespace TEXT NOT NULL, job TEXT NOT NULL, schedule_id TEXT NOT NULL,
    since INTEGER NOT NULL, settled INTEGER NOT NULL,
    PRIMARY KEY (namespace, job, schedule_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "schedule" VALUES('default','job','every:10s',1800000000000,1800000040000);
CREATE INDEX hold_of_instance ON hold (namespace, incarnation);
CREATE INDEX run_newest_first ON run (namespace, slot, job);
CREATE INDEX run_unfinished ON run (namespace, job, slot) WHERE final = 0;
COMMIT;
PRAGMA application_id = 1095647570;
PRAGMA user_version = 1;
