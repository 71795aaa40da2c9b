-- What belongs to the namespace and to no job: its identity, its instances, the index of its jobs.
--
-- In front stand the constants (`_scripts.py`). KEYS[1] is the namespace's key, with which all
-- that is touched begins. ARGV[1] is the request as JSON; `act` says what is asked.

local request = cjson.decode(ARGV[1])
local NS = KEYS[1]

-- The store's time (S1). A simulated one comes with the request, from tests alone.
local function time_us()
  if request.now_us then
    return request.now_us
  end
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local NOW_US = time_us()
local NOW = math.floor(NOW_US / 1000)

-- The namespace, made when it is first asked for --------------------------------------------

local meta = redis.call('HMGET', NS, 'schema', 'store_id')
if not meta[1] then
  redis.call('HSET', NS, 'schema', SCHEMA, 'store_id', request.store_id)
  meta = { SCHEMA, request.store_id }
elseif meta[1] == SCHEMA_BEFORE then
  redis.call('HSET', NS, 'schema', SCHEMA)
elseif meta[1] ~= SCHEMA then
  return redis.error_reply('ANARCHONSCHEMA ' .. meta[1])
end

local function reply(fields)
  fields.now_us, fields.store_id = string.format('%.0f', NOW_US), meta[2]
  return cjson.encode(fields)
end

-- Instances ---------------------------------------------------------------------------------

local INSTANCES = NS .. ':instances'

-- By incarnation: label, seen_at, lease_ms, registered, record.
local function instances()
  local found, all = {}, redis.call('HGETALL', INSTANCES)
  for i = 1, #all, 2 do
    local fine, instance = pcall(cjson.decode, all[i + 1])
    if fine and type(instance) == 'table' and type(instance.seen_at) == 'number'
      and type(instance.lease_ms) == 'number' then
      found[all[i]] = instance
    end
  end
  return found
end

local function is_live(instance)
  return NOW - instance.seen_at <= instance.lease_ms
end

local function put(given, registered)
  local instance = {
    label = given.label, seen_at = NOW, lease_ms = given.lease_ms,
    registered = registered, record = given.record,
  }
  redis.call('HSET', INSTANCES, given.incarnation, cjson.encode(instance))
end

local function jobs_of(incarnation)
  return NS .. ':jobs-of:' .. incarnation
end

-- Takes the instance away; the jobs that it held.
local function take_away(incarnation)
  local jobs = redis.call('SMEMBERS', jobs_of(incarnation))
  redis.call('DEL', jobs_of(incarnation))
  redis.call('HDEL', INSTANCES, incarnation)
  return jobs
end

-- Some values at a time, for commands that take many.
local function in_parts(values, act)
  for first = 1, #values, 1000 do
    act(unpack(values, first, math.min(first + 999, #values)))
  end
end

-- What is asked -----------------------------------------------------------------------------

local acts = {}

-- Tries every command that the others need, on keys that none of them has.
function acts.probe()
  local probe = NS .. ':probe'
  redis.call('HSET', probe, 'a', '1')
  redis.call('HMGET', probe, 'a')
  redis.call('HGETALL', probe)
  redis.call('HDEL', probe, 'a')
  redis.call('DEL', probe)
  redis.call('SADD', probe, 'a')
  redis.call('SMEMBERS', probe)
  redis.call('SREM', probe, 'a')
  redis.call('DEL', probe)
  redis.call('ZADD', probe, 0, 'a')
  redis.call('ZREM', probe, 'a')
  redis.call('DEL', probe)
  return {}
end

-- The instance lives, or leaves (S27, S32).
function acts.beat()
  local given, all = request.instance, instances()
  local before, twins = all[given.incarnation], {}
  for incarnation, other in pairs(all) do
    if other.label == given.label and incarnation ~= given.incarnation and is_live(other) then
      twins[#twins + 1] = incarnation
    end
  end
  local registered = before ~= nil and before.registered == true
  if request.leaving then
    return { known = registered, twins = twins, dropped = take_away(given.incarnation) }
  end
  put(given, registered)
  return { known = registered, twins = twins }
end

-- A registration begins: which instances were live before it. What the instance held longer than
-- its lease ago counts for nobody; and it is no more registered than it was.
function acts.begin()
  local given, all, live = request.instance, instances(), {}
  for incarnation, instance in pairs(all) do
    live[incarnation] = is_live(instance) or nil
  end
  local before = all[given.incarnation]
  put(given, before ~= nil and before.registered == true)
  return { live = live }
end

-- A registration is through: the instance holds these jobs, and has let go of those `dropped`.
function acts.finish()
  local given, indexed = request.instance, {}
  for _, job in ipairs(request.jobs) do
    indexed[#indexed + 1], indexed[#indexed + 2] = 0, job
  end
  in_parts(request.dropped, function(...)
    redis.call('SREM', jobs_of(given.incarnation), ...)
  end)
  in_parts(request.jobs, function(...)
    redis.call('SADD', jobs_of(given.incarnation), ...)
  end)
  in_parts(indexed, function(...)
    redis.call('ZADD', NS .. ':jobs', ...)
  end)
  put(given, true)
  return {}
end

-- Instances that were heard of last so long ago that nobody is shown them go, with what they held.
function acts.forget()
  local gone, live, lapsed = {}, {}, {}
  for incarnation, instance in pairs(instances()) do
    if NOW - instance.seen_at > instance.lease_ms + LOST_SHOWN then
      gone[#gone + 1] = {
        incarnation = incarnation, at = instance.seen_at, jobs = take_away(incarnation),
      }
    elseif is_live(instance) then
      live[incarnation] = true
    else
      lapsed[incarnation] = true
    end
  end
  return { gone = gone, live = live, lapsed = lapsed }
end

-- Jobs that are not there any more, and jobs that are there after all.
function acts.index()
  in_parts(request.gone, function(...)
    redis.call('ZREM', NS .. ':jobs', ...)
  end)
  for _, job in ipairs(request.there) do
    redis.call('ZADD', NS .. ':jobs', 0, job)
  end
  return {}
end

return reply(acts[request.act]())
