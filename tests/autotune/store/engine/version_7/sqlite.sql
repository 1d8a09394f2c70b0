CREATE TABLE families (
    "key" VARCHAR(64) NOT NULL,
    data JSON NOT NULL,
    ready_order JSON NOT NULL,
    PRIMARY KEY ("key")
);

CREATE TABLE jobs (
    id VARCHAR(64) NOT NULL,
    name TEXT NOT NULL,
    protocol VARCHAR(8) NOT NULL,
    phase VARCHAR(16) NOT NULL,
    revision BIGINT DEFAULT '0' NOT NULL,
    created_at FLOAT NOT NULL,
    last_contact_at FLOAT NOT NULL,
    ended_at FLOAT,
    finished_at FLOAT,
    round BIGINT DEFAULT '0' NOT NULL,
    fingerprint TEXT DEFAULT '' NOT NULL,
    model_key TEXT DEFAULT '' NOT NULL,
    network_key TEXT DEFAULT '' NOT NULL,
    spec JSON NOT NULL,
    data JSON NOT NULL,
    result JSON,
    inherited JSON,
    tensors JSON DEFAULT '[]' NOT NULL,
    PRIMARY KEY (id)
);

CREATE INDEX ix_jobs_fingerprint ON jobs (fingerprint);

CREATE INDEX ix_jobs_model_key ON jobs (model_key);

CREATE INDEX ix_jobs_network_key ON jobs (network_key);

CREATE INDEX jobs_by_creation ON jobs (created_at, id, name, phase, revision, last_contact_at, ended_at);

CREATE INDEX jobs_by_name ON jobs (name, created_at);

CREATE TABLE schema_version (
    version BIGINT NOT NULL,
    PRIMARY KEY (version)
);

CREATE TABLE aliases (
    alias TEXT NOT NULL,
    family VARCHAR(64) NOT NULL,
    PRIMARY KEY (alias),
    FOREIGN KEY(family) REFERENCES families ("key") ON DELETE CASCADE
);

CREATE TABLE events (
    id INTEGER NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    trial BIGINT,
    step BIGINT,
    message TEXT NOT NULL,
    seconds FLOAT,
    at FLOAT NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE INDEX ix_events_job_id ON events (job_id);

CREATE TABLE trials (
    id INTEGER NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    "index" BIGINT NOT NULL,
    purpose VARCHAR(16) NOT NULL,
    state VARCHAR(16) NOT NULL,
    configuration JSON NOT NULL,
    cost FLOAT,
    standard_error FLOAT,
    steps BIGINT NOT NULL,
    outliers BIGINT NOT NULL,
    failure TEXT,
    started_at FLOAT,
    ended_at FLOAT,
    round BIGINT DEFAULT '0' NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (job_id, "index"),
    FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE TABLE observations (
    id INTEGER NOT NULL,
    trial_id INTEGER NOT NULL,
    step BIGINT NOT NULL,
    slowest FLOAT,
    "values" JSON NOT NULL,
    compute JSON,
    PRIMARY KEY (id),
    UNIQUE (trial_id, step),
    FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);

CREATE TABLE profiles (
    id INTEGER NOT NULL,
    trial_id INTEGER NOT NULL,
    step BIGINT NOT NULL,
    content JSON NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (trial_id, step),
    FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);

ALTER TABLE events ADD COLUMN key VARCHAR(64);

CREATE UNIQUE INDEX events_by_key ON events (job_id, key);

ALTER TABLE trials ADD COLUMN late_steps BIGINT DEFAULT '0' NOT NULL;

ALTER TABLE trials ADD COLUMN thinned_steps BIGINT DEFAULT '0' NOT NULL;

CREATE TABLE chores (
    name VARCHAR(32) NOT NULL,
    due_at FLOAT NOT NULL,
    done_until FLOAT NOT NULL,
    PRIMARY KEY (name)
);

ALTER TABLE observations ADD COLUMN cost FLOAT;

CREATE TABLE claims (
    job_id VARCHAR(64) NOT NULL,
    owner VARCHAR(32) NOT NULL,
    until FLOAT NOT NULL,
    PRIMARY KEY (job_id),
    FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE TABLE lives (
    job_id VARCHAR(64) NOT NULL,
    previous VARCHAR(64) NOT NULL,
    first VARCHAR(64) NOT NULL,
    number BIGINT NOT NULL,
    PRIMARY KEY (job_id),
    UNIQUE (previous),
    FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE INDEX ix_lives_first ON lives (first);

ALTER TABLE observations ADD COLUMN complexity FLOAT;
