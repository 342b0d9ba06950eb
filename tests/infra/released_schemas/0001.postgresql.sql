CREATE TABLE runs (
    id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    flow VARCHAR NOT NULL,
    status VARCHAR NOT NULL,
    failure_class VARCHAR,
    cause TEXT,
    traceback TEXT,
    config JSON NOT NULL,
    output_dir VARCHAR,
    mlflow_run_id VARCHAR,
    prefect_flow_run_id VARCHAR,
    stages JSON NOT NULL,
    progress JSON NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    updated_at DOUBLE PRECISION NOT NULL,
    owner_pid INTEGER,
    owner_start_time DOUBLE PRECISION,
    owner_host VARCHAR,
    PRIMARY KEY (id),
    UNIQUE (name)
);

CREATE TABLE attempts (
    run_id VARCHAR NOT NULL,
    number INTEGER NOT NULL,
    status VARCHAR NOT NULL,
    failure_class VARCHAR,
    cause TEXT,
    traceback TEXT,
    resume_step INTEGER,
    started_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    PRIMARY KEY (run_id, number),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);

CREATE TABLE leases (
    id VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    host VARCHAR NOT NULL,
    resource VARCHAR NOT NULL,
    run_id VARCHAR,
    child_pid INTEGER,
    child_start_time DOUBLE PRECISION,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    owner_pid INTEGER,
    owner_start_time DOUBLE PRECISION,
    owner_host VARCHAR,
    PRIMARY KEY (id),
    UNIQUE (kind, host, resource),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE SET NULL
);

CREATE TABLE servers (
    id VARCHAR NOT NULL,
    run_id VARCHAR,
    name VARCHAR NOT NULL,
    url VARCHAR NOT NULL,
    host VARCHAR NOT NULL,
    pid INTEGER,
    lease_id VARCHAR,
    log_path VARCHAR,
    details JSON NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    exit VARCHAR,
    PRIMARY KEY (id),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);

CREATE TABLE checkpoints (
    run_id VARCHAR NOT NULL,
    step INTEGER NOT NULL,
    path VARCHAR NOT NULL,
    details JSON NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (run_id, step),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
