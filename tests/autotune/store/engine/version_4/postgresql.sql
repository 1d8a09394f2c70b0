CREATE TABLE families (
    key VARCHAR(64) NOT NULL,
    data JSON NOT NULL,
    ready_order JSON NOT NULL,
    PRIMARY KEY (key)
);

CREATE TABLE jobs (
    id VARCHAR(64) NOT NULL,
    name TEXT NOT NULL,
    protocol VARCHAR(8) NOT NULL,
    phase VARCHAR(16) NOT NULL,
    revision BIGINT DEFAULT '0' NOT NULL,
    created_at FLOAT(53) NOT NULL,
    last_contact_at FLOAT(53) NOT NULL,
    ended_at FLOAT(53),
    finished_at FLOAT(53),
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

CREATE INDEX jobs_by_creation ON jobs (created_at, id);

CREATE INDEX jobs_by_name ON jobs (name, created_at);

CREATE TABLE schema_version (
    version BIGINT NOT NULL,
    PRIMARY KEY (version)
);

CREATE TABLE aliases (
    alias TEXT NOT NULL,
    family VARCHAR(64) NOT NULL,
    PRIMARY KEY (alias),
    FOREIGN KEY(family) REFERENCES families (key) ON DELETE CASCADE
);

CREATE TABLE events (
    id BIGSERIAL NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    trial BIGINT,
    step BIGINT,
    message TEXT NOT NULL,
    seconds FLOAT(53),
    at FLOAT(53) NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE INDEX ix_events_job_id ON events (job_id);

CREATE TABLE trials (
    id BIGSERIAL NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    index BIGINT NOT NULL,
    purpose VARCHAR(16) NOT NULL,
    state VARCHAR(16) NOT NULL,
    configuration JSON NOT NULL,
    cost FLOAT(53),
    standard_error FLOAT(53),
    steps BIGINT NOT NULL,
    outliers BIGINT NOT NULL,
    failure TEXT,
    started_at FLOAT(53),
    ended_at FLOAT(53),
    round BIGINT DEFAULT '0' NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (job_id, index),
    FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE TABLE observations (
    id BIGSERIAL NOT NULL,
    trial_id BIGINT NOT NULL,
    step BIGINT NOT NULL,
    slowest FLOAT(53),
    values JSON NOT NULL,
    compute JSON,
    PRIMARY KEY (id),
    UNIQUE (trial_id, step),
    FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);

CREATE TABLE profiles (
    id BIGSERIAL NOT NULL,
    trial_id BIGINT NOT NULL,
    step BIGINT NOT NULL,
    content JSON NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (trial_id, step),
    FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);
