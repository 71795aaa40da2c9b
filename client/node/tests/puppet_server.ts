/** A gRPC server for tests, on a free port or a socket, that answers as the test says. */

import {
  create,
  fromBinary,
  toBinary,
  type DescMessage,
  type DescService,
} from '@bufbuild/protobuf';
import * as grpc from '@grpc/grpc-js';
import { toWire } from '../src/duration';
import {
  CompleteResponseSchema,
  KeepAliveResponseSchema,
  SessionService,
  SubscribeResponseSchema,
} from '../src/generated/anarchon/v1/session_pb';

type Call = grpc.ServerUnaryCall<unknown, unknown> & grpc.ServerWritableStream<unknown, unknown>;
type Answer = (call: Call, callback: grpc.sendUnaryData<unknown>) => void;

/** What grpc-js wants to know of a generated service. */
export function definitionOf(service: DescService): grpc.ServiceDefinition {
  const write = (schema: DescMessage) => (message: unknown) =>
    Buffer.from(toBinary(schema, message as never));
  const read = (schema: DescMessage) => (bytes: Buffer) => fromBinary(schema, bytes);
  const methods = service.methods.map((method) => [
    method.localName,
    {
      path: `/${service.typeName}/${method.name}`,
      requestStream: false,
      responseStream: method.methodKind === 'server_streaming',
      requestSerialize: write(method.input),
      requestDeserialize: read(method.input),
      responseSerialize: write(method.output),
      responseDeserialize: read(method.output),
    },
  ]);
  return Object.fromEntries(methods) as grpc.ServiceDefinition;
}

/** An error as a sidecar answers it. */
export function status(
  code: grpc.status,
  details: string,
  reason = '',
): Partial<grpc.StatusObject> {
  const metadata = new grpc.Metadata();
  if (reason) metadata.set('anarchon-reason', reason);
  return { code, details, metadata };
}

export class PuppetServer {
  readonly server = new grpc.Server();
  /** The metadata of every call, by method. */
  readonly calls: { method: string; metadata: grpc.Metadata }[] = [];
  address = '';

  /** Serve `answers`, by method. */
  constructor(service: DescService, answers: Record<string, Answer>) {
    const kept = Object.entries(answers).map(([method, answer]) => [
      method,
      (call: Call, callback: grpc.sendUnaryData<unknown>) => {
        this.calls.push({ method, metadata: call.metadata });
        answer(call, callback);
      },
    ]);
    this.server.addService(
      definitionOf(service),
      Object.fromEntries(kept) as grpc.UntypedServiceImplementation,
    );
  }

  /** A sidecar that attaches, answers keep-alives and records results. */
  static polite(answers: Record<string, Answer> = {}): PuppetServer {
    return new PuppetServer(SessionService, {
      subscribe: (call) => {
        const value = { instanceId: 'puppet', sessionTtl: toWire(15_000) };
        call.write(create(SubscribeResponseSchema, { event: { case: 'attached', value } }));
      },
      keepAlive: (_, callback) =>
        callback(
          null,
          create(KeepAliveResponseSchema, { sessionTtl: toWire(15_000), streamOpen: true }),
        ),
      complete: (_, callback) => callback(null, create(CompleteResponseSchema)),
      ...answers,
    });
  }

  start(address = '127.0.0.1:0'): Promise<this> {
    return new Promise((resolve, reject) => {
      this.server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error, port) => {
        if (error) {
          reject(error);
          return;
        }
        this.address = port > 1 ? `127.0.0.1:${port}` : address;
        resolve(this);
      });
    });
  }

  stop(): void {
    this.server.forceShutdown();
  }
}
