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
    spec JSON NOT NULL,
    tensors JSON NOT NULL,
    data JSON NOT NULL,
    result JSON,
    created_at FLOAT NOT NULL,
    last_contact_at FLOAT NOT NULL,
    ended_at FLOAT,
    finished_at FLOAT,
    PRIMARY KEY (id)
);

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
    PRIMARY KEY (id),
    UNIQUE (job_id, "index"),
    FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE TABLE observations (
    id INTEGER NOT NULL,
    trial_id INTEGER NOT NULL,
    step BIGINT NOT NULL,
    "values" JSON NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (trial_id, step),
    FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);
