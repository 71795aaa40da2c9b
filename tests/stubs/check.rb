# Loads the Ruby stubs, which are on the load path, and sends a message through bytes.
require "anarchon/v1/admin_services_pb"
require "anarchon/v1/session_services_pb"

calls = Anarchon::V1::SessionService::Stub.instance_methods(false).sort
raise "the service has #{calls}" unless calls == %i[close_session complete keep_alive subscribe]

job = Anarchon::V1::JobSpec.new(name: "hello", overlap: :OVERLAP_POLICY_QUEUE)
sent = Anarchon::V1::SubscribeRequest.new(session_id: "one", jobs: [job])
got = Anarchon::V1::SubscribeRequest.decode(Anarchon::V1::SubscribeRequest.encode(sent))
raise "#{got} came out" unless got == sent && got.jobs[0].overlap == :OVERLAP_POLICY_QUEUE

puts "a session and a job"
