/** The protocol's own messages, as `AdminClient` answers and `FakeSidecar` keeps them. */

export * from './generated/anarchon/v1/admin_pb';
export * from './generated/anarchon/v1/error_pb';
export * from './generated/anarchon/v1/job_pb';
export * from './generated/anarchon/v1/run_pb';
export * from './generated/anarchon/v1/session_pb';
