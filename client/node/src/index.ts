/** The Anarchon client: the public names, nothing else. */

export { credentials } from '@grpc/grpc-js';
export {
  AdminClient,
  type AdminOptions,
  type ListRunsOptions,
  type WatchRunsOptions,
} from './admin';
export { AnarchonClient, type ClientOptions, type Subscription } from './client';
export type { Clock } from './clock';
export type { Context, Trigger } from './context';
export type { Duration } from './duration';
export {
  AnarchonError,
  CancelledError,
  ClientError,
  CredentialsError,
  FencedError,
  JobError,
  LeaseLostError,
  NotConfirmedError,
  NotFoundError,
  Permanent,
  RefusedError,
  Retry,
  SessionNotFoundError,
  SessionReplacedError,
  SidecarError,
  SidecarUnavailableError,
  UnsupportedError,
  VersionError,
  type CancelReason,
  type RetryOptions,
} from './errors';
export {
  byName,
  cron,
  every,
  onTrigger,
  type CronOptions,
  type EveryOptions,
  type Handler,
  type Job,
  type JobOptions,
  type Jobs,
  type Policies,
} from './jobs';
export type { Logger } from './logger';
export type { RunWatch } from './run_watch';
export type { EndpointOptions, StreamListener, Transport } from './transport';
