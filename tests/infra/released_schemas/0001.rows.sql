INSERT INTO runs (id, name, flow, status, failure_class, cause, traceback, config, output_dir, mlflow_run_id, prefect_flow_run_id, stages, progress, created_at, updated_at, owner_pid, owner_start_time, owner_host) VALUES ('0a1b', 'grpo-first', 'train-grpo', 'FAILED', 'memory', 'out of memory: 12 GiB', 'Traceback …', '{"type": "grpo", "learning_rate": 1e-06}', '/runs/grpo-first', 'ml-1', 'pf-1', '{"evaluate_before": {"accuracy_before": 0.25}}', '{"step": 40, "max_steps": 100, "updated_at": 1700000100.5}', 1700000000.25, 1700000200.5, NULL, NULL, NULL);

INSERT INTO runs (id, name, flow, status, failure_class, cause, traceback, config, output_dir, mlflow_run_id, prefect_flow_run_id, stages, progress, created_at, updated_at, owner_pid, owner_start_time, owner_host) VALUES ('0a1c', 'sft-second', 'sft-long-context', 'RUNNING', NULL, NULL, NULL, '{}', NULL, NULL, NULL, '{}', '{}', 1700000300.0, 1700000300.0, 4711, 12.5, 'here');

INSERT INTO attempts (run_id, number, status, failure_class, cause, traceback, resume_step, started_at, ended_at) VALUES ('0a1b', 1, 'FAILED', 'memory', 'out of memory: 12 GiB', 'Traceback …', NULL, 1700000010.0, 1700000190.0);

INSERT INTO leases (id, kind, host, resource, run_id, child_pid, child_start_time, created_at, expires_at, owner_pid, owner_start_time, owner_host) VALUES ('1e01', 'port', 'here', '23456', '0a1c', 4712, 13.5, 1700000300.0, 1700000900.0, 4711, 12.5, 'here');

INSERT INTO servers (id, run_id, name, url, host, pid, lease_id, log_path, details, started_at, ended_at, exit) VALUES ('5e01', '0a1b', 'student-0', 'http://127.0.0.1:23456', 'here', 4712, '1e01', '/servers/log', '{"model": "tiny"}', 1700000011.0, 1700000191.0, 'exit code 0');

INSERT INTO checkpoints (run_id, step, path, details, created_at) VALUES ('0a1b', 40, '/runs/grpo-first/checkpoint-40', '{"reward": 0.5}', 1700000150.0);
