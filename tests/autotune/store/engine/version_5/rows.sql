INSERT INTO families ("key", data, ready_order)
VALUES ('family', '{"n": 0}', '[]');

INSERT INTO jobs (id, name, protocol, phase, spec, data, result, created_at, last_contact_at, ended_at, finished_at, round, fingerprint, model_key, network_key, inherited, revision, tensors)
VALUES ('done', 'digits', 'v2', 'tuning', '{"name": "digits", "world_size": 4, "ranks_per_node": [2, 2], "knobs": {"bucket_bytes": {"type": "log_integer", "low": 65536, "high": 1073741824}, "hierarchical": {"type": "categorical", "values": ["off", "leaders"]}}, "default_configuration": {"bucket_bytes": 26214400, "hierarchical": "off"}, "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "limits": {"max_samples": 3, "trial_seconds": 5.0, "warmup_seconds": 30.0}, "software": {"torch": "2.13.0"}}', '{}', '{"configuration": {"bucket_bytes": 26214400, "hierarchical": "off"}, "kept": "baseline", "speedup": 1.0, "low": 1.0, "high": 1.0, "trials": 3, "steps": 30, "seconds": 4.5, "summary": "bucket 25 MiB, flat (the default) kept: nothing measured faster; 3 trials, 4 s"}', 1000.5, 1011.75, NULL, NULL, 1, 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '', '', NULL, 0, '[{"name": "head.weight", "elements": 100000, "bytes": 400000, "dtype": "torch.float32", "group": "torch.float32/cpu"}, {"name": "body.weight", "elements": 6000000, "bytes": 24000000, "dtype": "torch.float32", "group": "torch.float32/cpu"}, {"name": "stem.weight", "elements": 1000000, "bytes": 4000000, "dtype": "torch.float32", "group": "torch.float32/cpu"}]');

INSERT INTO jobs (id, name, protocol, phase, spec, data, result, created_at, last_contact_at, ended_at, finished_at, round, fingerprint, model_key, network_key, inherited, revision, tensors)
VALUES ('half', 'half way', 'v2', 'tuning', '{"name": "half way", "world_size": 4, "ranks_per_node": [2, 2], "knobs": {"bucket_bytes": {"type": "log_integer", "low": 65536, "high": 1073741824}, "hierarchical": {"type": "categorical", "values": ["off", "leaders"]}}, "default_configuration": {"bucket_bytes": 26214400, "hierarchical": "off"}, "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "limits": {"max_samples": 60, "trial_seconds": 5.0, "warmup_seconds": 30.0}, "software": {}}', '{}', NULL, 1006.0, 1007.0, NULL, NULL, 0, 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '', '', NULL, 0, '[{"name": "head.weight", "elements": 100000, "bytes": 400000, "dtype": "torch.float32", "group": "torch.float32/cpu"}, {"name": "body.weight", "elements": 6000000, "bytes": 24000000, "dtype": "torch.float32", "group": "torch.float32/cpu"}, {"name": "stem.weight", "elements": 1000000, "bytes": 4000000, "dtype": "torch.float32", "group": "torch.float32/cpu"}]');

INSERT INTO jobs (id, name, protocol, phase, spec, data, result, created_at, last_contact_at, ended_at, finished_at, round, fingerprint, model_key, network_key, inherited, revision, tensors)
VALUES ('like', 'like done', 'v2', 'tuning', '{"name": "like done", "world_size": 4, "ranks_per_node": [2, 2], "knobs": {"bucket_bytes": {"type": "log_integer", "low": 65536, "high": 1073741824}, "hierarchical": {"type": "categorical", "values": ["off", "leaders"]}}, "default_configuration": {"bucket_bytes": 26214400, "hierarchical": "off"}, "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "limits": {"max_samples": 60, "trial_seconds": 5.0, "warmup_seconds": 30.0, "remaining_steps": 10000, "max_rounds": 10}, "software": {}}', '{}', NULL, 1020.0, 1020.0, NULL, NULL, 0, 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', 'mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm', 'nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn', '{"configuration": {"bucket_bytes": 26214400, "hierarchical": "off"}, "gain": 0.0, "ready_seconds": [0.1, 0.15, 0.2], "costs": {}, "source": "done"}', 0, '[{"name": "head.weight", "elements": 100000, "bytes": 400000, "dtype": "torch.float32", "group": "torch.float32/cpu"}, {"name": "body.weight", "elements": 6000000, "bytes": 24000000, "dtype": "torch.float32", "group": "torch.float32/cpu"}, {"name": "stem.weight", "elements": 1000000, "bytes": 4000000, "dtype": "torch.float32", "group": "torch.float32/cpu"}]');

INSERT INTO schema_version (version)
VALUES (5);

INSERT INTO aliases (alias, family)
VALUES ('DDP_140', 'family');

INSERT INTO events (job_id, kind, trial, step, message, seconds, at)
VALUES ('done', 'note', NULL, NULL, 'grüße', NULL, 1005.5);

INSERT INTO events (job_id, kind, trial, step, message, seconds, at)
VALUES ('done', 'switched', 3, 140, '', 0.02, 1011.75);

INSERT INTO trials (job_id, "index", purpose, state, configuration, cost, standard_error, steps, outliers, failure, started_at, ended_at, round)
VALUES ('done', 0, 'search', 'measured', '{"bucket_bytes": 26214400, "hierarchical": "off"}', -1.480386, 0.000859, 8, 0, NULL, 1001.5, 1003.0, 0);

INSERT INTO trials (job_id, "index", purpose, state, configuration, cost, standard_error, steps, outliers, failure, started_at, ended_at, round)
VALUES ('done', 1, 'search', 'measured', '{"bucket_bytes": 65536, "hierarchical": "leaders"}', -1.141937, 0.001022, 6, 0, NULL, 1003.5, 1004.0, 0);

INSERT INTO trials (job_id, "index", purpose, state, configuration, cost, standard_error, steps, outliers, failure, started_at, ended_at, round)
VALUES ('done', 2, 'search', 'measured', '{"bucket_bytes": 65536, "hierarchical": "off"}', -1.068132, 0.00123, 6, 0, NULL, 1004.5, 1005.0, 0);

INSERT INTO trials (job_id, "index", purpose, state, configuration, cost, standard_error, steps, outliers, failure, started_at, ended_at, round)
VALUES ('half', 0, 'search', 'running', '{"bucket_bytes": 26214400, "hierarchical": "off"}', NULL, NULL, 0, 0, NULL, 1007.0, NULL, 0);

INSERT INTO trials (job_id, "index", purpose, state, configuration, cost, standard_error, steps, outliers, failure, started_at, ended_at, round)
VALUES ('done', 3, 'search', 'running', '{"bucket_bytes": 26214400, "hierarchical": "off"}', NULL, NULL, 0, 0, NULL, 1011.0, NULL, 1);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (1, 17, '[0.2273, 0.227, 0.2277, 0.2267]', 0.2277, NULL);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (1, 18, '[0.2272, 0.2273, 0.2274, 0.2267]', 0.2274, NULL);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (2, 19, '[0.3186, 0.3192, 0.3203, 0.3201]', 0.3203, NULL);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (2, 20, '[0.3191, 0.3169, 0.3186, 0.3181]', 0.3191, NULL);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (4, 31, '[0.2255, 0.2269, 0.2273, 0.2262]', 0.2273, NULL);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (4, 32, '[0.2257, 0.2265, 0.2262, 0.2256]', 0.2265, NULL);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (5, 140, '[0.3, 0.31, 0.29, 0.3]', 0.31, NULL);

INSERT INTO observations (trial_id, step, "values", slowest, compute)
VALUES (5, 141, '[0.3, 0.31, 0.29, 0.3]', 0.31, NULL);

INSERT INTO profiles (trial_id, step, content)
VALUES (5, 141, '{"step": 141, "step_seconds": 0.31, "ready_seconds": [0.1, 0.15, 0.2], "buckets": [{"bytes": 28000000, "started_seconds": 0.15, "ended_seconds": 0.31}]}');
