-- The life of a run, as the module `machine` says it, for the scripts that stand after this text.
--
-- In front of it stand the constants (`_scripts.py`): FIELDS, KIND, SCHEMA and the limits.
-- ARGV[1] is the batch as JSON. Every number is whole milliseconds, but for NOW_US and fences:
-- these have 16 digits, of which `..`, `tostring` and cjson would keep 14 (see `text`).
--
-- KEYS[1] is the namespace's key, KEYS[2] and so on those of the jobs, one an item of the batch.
-- In a cluster the namespace's keys are on a node of their own, and so are those of each job: then
-- (`batch.apart`) KEYS are those of one job alone, once an item, and NS is nil. Whatever a claim
-- depends on is in its job's keys. What the namespace keeps (instances, lists of jobs and runs,
-- how often runs were freed) is for people, for wake-ups, and for who is alive.

local batch = cjson.decode(ARGV[1])
local NS = not batch.apart and KEYS[1] or nil
local BEFORE = NS and 1 or 0 -- the keys that stand before the items'

-- The store's time (S1). A simulated one comes with the batch, from tests alone.
local function time_us()
  if batch.now_us then
    return batch.now_us
  end
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local NOW_US = time_us()
local NOW = math.floor(NOW_US / 1000)

local TRIGGERS = { schedule = true, manual = true, catch_up = true }
local CAUSES = { claim = true, takeover = true, retry = true }
local FINAL = { success = true, failed = true, skipped = true }
local HELD = { claimed = true, running = true, interrupted = true }
local CANCELLED_AS = { timeout = 'timeout', requested = 'cancelled', superseded = 'superseded' }
local CURRENT = { -- the fields of the newest attempt, by the names that past ones are kept under
  token = 'token', fence = 'fence', instance_id = 'instance_id', incarnation = 'incarnation',
  cause = 'cause', state = 'attempt_state', reason = 'attempt_reason', claimed_at = 'claimed_at',
  started_at = 'started_at', ended_at = 'attempt_ended_at', failure = 'failure', result = 'result',
}

local function text(value)
  if type(value) == 'number' then
    return string.format('%.0f', value)
  end
  return value
end

-- What the store holds is input: a record that nobody of ours wrote spoils its own item alone.
local function broken(key, why)
  error({ broken = key .. ': ' .. why })
end

local function number(key, value, otherwise)
  if not value or value == '' then
    return otherwise
  end
  return tonumber(value) or broken(key, 'not a number where one belongs')
end

-- The answer to a reading command; only a key of another kind is the record's own fault.
local function read(key, ...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'WRONGTYPE', 1, true) then
      broken(key, reply.err)
    end
    error(reply.err, 0)
  end
  return reply
end

-- The layout ------------------------------------------------------------------------------

local meta = {}
if NS then
  -- The namespace, made when it is first asked for.
  meta = redis.call('HMGET', NS, 'schema', 'store_id')
  if not meta[1] then
    redis.call('HSET', NS, 'schema', SCHEMA, 'store_id', batch.store_id)
    meta = { SCHEMA, batch.store_id }
  end
else
  meta[1] = redis.call('HGET', KEYS[1], 'schema') or SCHEMA
  -- While a cluster moves a slot, key by key, a node refuses what asks for a key that is not there
  -- (any more). Here it does so before the first write, so that nothing is done by half.
  for _, part in ipairs({ ':runs', ':open', ':definitions', ':holds' }) do
    redis.call('EXISTS', KEYS[1] .. part)
  end
end
if meta[1] ~= SCHEMA then
  return redis.error_reply('ANARCHONSCHEMA ' .. meta[1])
end

-- Jobs --------------------------------------------------------------------------------------

-- What the store keeps per job; `settled` is that of the schedule asked for (nil: not known).
local function load_job(key, schedule_id)
  local values = read(key, 'HMGET', key, 'floor', 'fence', 'definition_id', 'schedule_id',
    'definition_at', 'settled:' .. schedule_id, 'since:' .. schedule_id)
  return {
    floor = number(key, values[1], -1),
    fence = number(key, values[2], 0),
    definition_id = values[3] or '',
    schedule_id = values[4] or '',
    definition_at = number(key, values[5], 0),
    settled = number(key, values[6], nil),
    since = number(key, values[7], nil),
  }
end

local function fence_of(key)
  local fine, fence = pcall(read, key, 'HGET', key, 'fence')
  if not fine and type(fence) ~= 'table' then
    error(fence, 0)
  end
  return fine and fence or '0'
end

-- Runs --------------------------------------------------------------------------------------

local NOTHING = { __index = {} } -- what a field is that is not there: '' or 0, or nil for a number
for field, kind in pairs(KIND) do
  if kind ~= 'number' then
    NOTHING.__index[field] = kind == 'text' and '' or 0
  end
end

-- A run is its fields, and as text those that are stored.
local function fresh_run(job, slot)
  local stored = { job = job, slot = text(slot) }
  return setmetatable({ job = job, slot = slot, stored = stored, new = true }, NOTHING)
end

local function check_run(key, run)
  if not FINAL[run.state] and not HELD[run.state] then
    broken(key, 'state ' .. run.state)
  end
  if not TRIGGERS[run.trigger] then
    broken(key, 'trigger ' .. run.trigger)
  end
  if run.attempt > 0 then
    if not CAUSES[run.cause] or run.token == '' or run.fence == 0 or run.claimed_at == 0 then
      broken(key, 'an attempt without a cause, token, fence or time')
    end
    if not HELD[run.attempt_state] and not FINAL[run.attempt_state] then
      broken(key, 'attempt_state ' .. run.attempt_state)
    end
  end
  if FINAL[run.state] then
    return
  end
  if run.attempt < 1 then
    broken(key, 'not final, and without an attempt')
  end
  if run.freed == '' and not (run.lease_until and run.lease_length_ms and run.lease_end_at) then
    broken(key, 'neither freed nor leased')
  end
  if run.cancel ~= '' and not CANCELLED_AS[run.cancel] then
    broken(key, 'cancel ' .. run.cancel)
  end
end

-- The slot's row, or nil.
local function load_run(job_key, job, slot)
  local key = job_key .. ':' .. text(slot)
  local values = read(key, 'HMGET', key, unpack(FIELDS))
  if not values[1] then
    return nil
  end
  local run = fresh_run(job, slot)
  run.new = false
  for i, field in ipairs(FIELDS) do
    local value = values[i]
    if value and value ~= '' then
      run.stored[field] = value
      run[field] = KIND[field] == 'text' and value or number(key, value)
    end
  end
  check_run(key, run)
  return run
end

-- A field as it is stored; '' where it is nothing.
local function stored_as(field, value)
  if value == nil or (value == 0 and KIND[field] == 'count') then
    return ''
  end
  return type(value) == 'number' and string.format('%.0f', value) or value
end

-- Brings `stored` up to date; what changed, as HSET takes it.
local function changes_of(run)
  local changes, stored = {}, run.stored
  for field, value in pairs(run) do
    if KIND[field] then
      value = stored_as(field, value)
      if value ~= (stored[field] or '') then
        changes[#changes + 1] = field
        changes[#changes + 1] = value
        stored[field] = value
      end
    end
  end
  for field, value in pairs(stored) do
    if run[field] == nil and value ~= '' then
      changes[#changes + 1] = field
      changes[#changes + 1] = ''
      stored[field] = ''
    end
  end
  return changes
end

local freed_runs = 0

local function save_run(job_key, run)
  local slot = run.stored.slot
  local changes = changes_of(run)
  if run.past then
    changes[#changes + 1] = 'past:' .. text(run.past.attempt)
    changes[#changes + 1] = run.past.record
    run.past = nil
  end
  if #changes > 0 then
    redis.call('HSET', job_key .. ':' .. slot, unpack(changes))
  end
  if run.new then
    redis.call('ZADD', job_key .. ':runs', slot, slot)
    if NS then
      redis.call('ZADD', NS .. ':runs', slot, slot .. ' ' .. run.job)
    end
  end
  if FINAL[run.state] then
    if not run.new then
      redis.call('ZREM', job_key .. ':open', slot)
    end
  elseif run.new then
    redis.call('ZADD', job_key .. ':open', slot, slot)
  end
  run.new = false
  if run.freed ~= '' then
    freed_runs = freed_runs + 1
  end
end

-- The run for an answer, as it is stored.
local function shown(run)
  return run and run.stored
end

local function unfinished(job_key)
  return read(job_key .. ':open', 'ZRANGE', job_key .. ':open', 0, -1)
end

-- Leases ------------------------------------------------------------------------------------

local function margin(lease_ms)
  return math.floor(lease_ms / MARGIN_SHARE)
end

-- What is left of the lease; at most 0: it is over; nil: there is none. One whose end lies
-- further ahead than its length and the margin allow was written before the clock stepped back.
local function lease_left(run)
  if not run.lease_until or FINAL[run.state] then
    return nil
  end
  local left = run.lease_until - NOW
  if left > run.lease_length_ms + margin(run.lease_length_ms) then
    return 0
  end
  return left
end

local function takeable(run)
  local left = lease_left(run)
  return run.freed ~= '' or (left ~= nil and left <= 0)
end

-- A lease from now on. It never shrinks, unless its end makes no sense any more (F8).
local function renew_lease(run, length_ms)
  if run.lease_until then
    local ahead = run.lease_until - NOW
    if ahead <= run.lease_length_ms + margin(run.lease_length_ms) and ahead > length_ms then
      run.lease_end_at = NOW + ahead
      return
    end
  end
  run.lease_until, run.lease_length_ms = NOW + length_ms, length_ms
  run.lease_end_at = NOW + length_ms
end

-- Whether the present attempt's lease may still be renewed by its token (S17, S21a).
local function is_good(run)
  if FINAL[run.state] or run.freed ~= '' or run.attempt == 0 then
    return false
  end
  return run.cancel == '' or math.abs(NOW - run.cancelled_at) <= run.cancel_grace_ms
end

-- How attempts and runs end -----------------------------------------------------------------

local function counts_as_lost(run)
  return run.freed == '' or run.freed == 'runner_lost'
end

local function over_since(run)
  if run.freed ~= '' then
    return run.attempt_ended_at
  end
  return math.min(NOW, run.lease_end_at)
end

-- Closes the present attempt, and counts it where it counts.
local function interrupt(run)
  run.lost = run.lost + (counts_as_lost(run) and 1 or 0)
  if run.freed == '' then
    run.attempt_ended_at = over_since(run)
    run.attempt_state, run.attempt_reason = 'interrupted', 'runner_lost'
  end
end

local function end_run(run, state, reason)
  run.state, run.reason, run.freed, run.ended_at = state, reason, '', NOW
  run.lease_until, run.lease_length_ms, run.lease_end_at = nil, nil, nil
end

local function finish(run, reason)
  interrupt(run)
  if run.cancel ~= '' then
    run.attempt_state, run.attempt_reason = 'failed', reason
  end
  end_run(run, 'failed', reason)
  return true
end

-- Ends a run whose attempt is over and that may have no other (S19, S21a); whether it did.
local function ended_instead(run)
  if run.cancel ~= '' then
    return finish(run, CANCELLED_AS[run.cancel])
  end
  local lost = run.lost + (counts_as_lost(run) and 1 or 0)
  if lost >= run.max_attempts or run.attempt >= ATTEMPTS_MAX then
    return finish(run, 'attempts_exhausted')
  end
  local since = over_since(run)
  if since and run.window_ms ~= 0 and since < NOW - run.window_ms then
    return finish(run, 'abandoned')
  end
  return false
end

-- The present attempt is over now, and the run open for the next, or ended with it.
local function free(run, reason)
  run.attempt_state, run.attempt_reason, run.attempt_ended_at = 'interrupted', reason, NOW
  run.state, run.reason, run.freed = 'interrupted', reason, reason
  ended_instead(run)
end

-- Instances ---------------------------------------------------------------------------------

local instances_read

-- By incarnation: label, seen_at, lease_ms, registered, record.
local function instances()
  if instances_read then
    return instances_read
  end
  instances_read = {}
  local all = redis.call('HGETALL', NS .. ':instances')
  for i = 1, #all, 2 do
    local fine, instance = pcall(cjson.decode, all[i + 1])
    if fine and type(instance) == 'table' and type(instance.seen_at) == 'number'
      and type(instance.lease_ms) == 'number' then
      instances_read[all[i]] = instance
    end
  end
  return instances_read
end

local function is_live(instance)
  return NOW - instance.seen_at <= instance.lease_ms
end

local function put_instance(given, registered)
  local known = instances()[given.incarnation]
  registered = registered or (known ~= nil and known.registered == true)
  local instance = {
    label = given.label, seen_at = NOW, lease_ms = given.lease_ms,
    registered = registered, record = given.record,
  }
  redis.call('HSET', NS .. ':instances', given.incarnation, cjson.encode(instance))
  instances()[given.incarnation] = instance
end

-- A heartbeat's last word: whether the instance is known, and who else has its label (S32).
local function say_alive(given, leaving)
  local before, twins = instances()[given.incarnation], {}
  for incarnation, other in pairs(instances()) do
    if other.label == given.label and incarnation ~= given.incarnation and is_live(other) then
      twins[#twins + 1] = incarnation
    end
  end
  if not leaving then
    put_instance(given, false)
  end
  return before ~= nil and before.registered == true, twins
end

-- Which instances live is asked of the namespace first, and comes with the batch.
local LIVE = {}
for _, incarnation in ipairs(batch.live or {}) do
  LIVE[incarnation] = true
end

-- What an instance holds, as it is stored: `held`, pairs of a definition and its schedule, and when
-- it said so last (`at`).
local function hold_of(stored)
  local fine, hold = pcall(cjson.decode, stored)
  if fine and type(hold) == 'table' and type(hold.held) == 'table' and type(hold.at) == 'number' then
    return hold
  end
  return { held = {}, at = 0 }
end

-- What live instances hold of a job: a list of {definition_id, schedule_id, by = incarnation}; the
-- definitions that anybody holds; and, as it is stored, what `own` holds.
local function holds(key, own)
  local live, ever, stored = {}, {}, nil
  local all = read(key .. ':holds', 'HGETALL', key .. ':holds')
  for i = 1, #all, 2 do
    local incarnation = all[i]
    if incarnation == own then
      stored = all[i + 1]
    end
    for _, pair in ipairs(hold_of(all[i + 1]).held) do
      ever[pair[1]] = true
      if LIVE[incarnation] then
        live[#live + 1] = { pair[1], pair[2], by = incarnation }
      end
    end
  end
  return live, ever, stored
end

local function differ(live)
  for _, hold in ipairs(live) do
    if hold[1] ~= live[1][1] then
      return true
    end
  end
  return false
end

-- Notes on each definition of one job that the instance held it until `at`, and drops its hold.
-- One that it renewed after `until` stays: the instance has come back meanwhile.
local function let_go_of(key, incarnation, at, until_)
  local stored = redis.call('HGET', key .. ':holds', incarnation)
  local hold = stored and hold_of(stored)
  if not hold or (until_ and hold.at > until_) then
    return
  end
  for _, pair in ipairs(hold.held) do
    local field = pair[1] .. ':held_at'
    local before = redis.call('HGET', key .. ':definitions', field)
    if before and tonumber(before) < at then
      redis.call('HSET', key .. ':definitions', field, text(at))
    end
  end
  redis.call('HDEL', key .. ':holds', incarnation)
end

-- One command for every hundred of many members.
local function for_all(members, act)
  for first = 1, #members, 100 do
    act(unpack(members, first, math.min(first + 99, #members)))
  end
end

-- Answers -----------------------------------------------------------------------------------

-- What `act(...)` returns, or what is broken.
local function unless_broken(act, ...)
  local fine, answer = pcall(act, ...)
  if fine then
    return answer
  end
  if type(answer) ~= 'table' or not answer.broken then
    error(answer, 0)
  end
  return nil, answer.broken
end

-- The answers of `judge(item, key)` in the batch's order; `others` have keys before the items'.
local function answers_of(items, judge, others)
  local answers = {}
  for i, item in ipairs(items) do
    local key = KEYS[BEFORE + (others or 0) + i]
    local answer, why = unless_broken(judge, item, key)
    answer = answer or { outcome = 'broken', broken = why }
    answer.fence = answer.fence or fence_of(key)
    answers[i] = answer
  end
  return answers
end

-- Wakes whoever watches, where a run was freed; nothing depends on it (S19).
local function reply(fields)
  if freed_runs > 0 and NS then
    local times = redis.call('HINCRBY', NS, 'freed', 1)
    redis.pcall('PUBLISH', NS .. ':news', times)
  end
  if batch.durable and #KEYS > BEFORE then
    -- A repeated call may have nothing to write, and waiting for replicas or the disk means this
    -- connection's last write. With this one, all that stood in the server before is waited for.
    redis.call('HSET', KEYS[#KEYS], 'asked_at', text(NOW))
  end
  fields.freed = freed_runs
  fields.now_us, fields.store_id = text(NOW_US), meta[2]
  return cjson.encode(fields)
end
