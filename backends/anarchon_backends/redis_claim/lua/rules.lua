-- The life of a run, as the module `claim_only` says it, for the scripts that stand after this text.
--
-- In front of it stand the constants (`_scripts.py`): FIELDS, KIND, SCHEMA and the limits.
-- KEYS are those of the jobs, one an item of the batch; whatever else is touched of a job has its
-- key in front. ARGV[1] is the batch as JSON. Every number is whole milliseconds, but for NOW_US,
-- which has 16 digits, of which `..`, `tostring` and cjson would keep 14 (see `text`).

local batch = cjson.decode(ARGV[1])

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

local FINAL = { success = true, failed = true, skipped = true }
local HELD = { claimed = true, running = true }
local WAITS = { due = true }
local BETWEEN = { retrying = true } -- no attempt holds it, and another may follow
local ATTEMPT = { claimed = true, running = true, interrupted = true, success = true, failed = true }
local TRIGGERS = { schedule = true, manual = true }
local CANCELLED_AS = { timeout = 'timeout', requested = 'cancelled', superseded = 'superseded' }

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

-- Only a key of another kind is the record's own fault.
local function read_failed(key, reply)
  if string.find(reply.err, 'WRONGTYPE', 1, true) then
    broken(key, reply.err)
  end
  error(reply.err, 0)
end

local function read(key, ...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    read_failed(key, reply)
  end
  return reply
end

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

-- The layout of each job is looked at before anything is written -----------------------------

-- One of the layout before becomes one of this with its next run, registration or pause: nothing that
-- it has means another thing.
local is_new = {}
for _, key in ipairs(KEYS) do
  local schema = unless_broken(read, key, 'HGET', key, 'schema')
  if schema and schema ~= SCHEMA and schema ~= SCHEMA_BEFORE then
    return redis.error_reply('ANARCHONSCHEMA ' .. schema)
  end
  is_new[key] = schema ~= SCHEMA
end

local function mark(key)
  if is_new[key] then
    redis.call('HSET', key, 'schema', SCHEMA)
    is_new[key] = false
  end
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
  local run = { job = job, slot = slot, stored = stored, new = true, trigger = 'schedule' }
  return setmetatable(run, NOTHING)
end

local function check_run(key, run)
  if not (FINAL[run.state] or HELD[run.state] or WAITS[run.state] or BETWEEN[run.state]) then
    broken(key, 'state ' .. run.state)
  end
  if not TRIGGERS[run.trigger] then
    broken(key, 'trigger ' .. run.trigger)
  end
  if run.token == '' then
    if run.state ~= 'skipped' and not WAITS[run.state] then
      broken(key, run.state .. ', and without an attempt')
    end
  elseif not ATTEMPT[run.attempt_state] or run.claimed_at == 0 then
    broken(key, 'an attempt without a state or time')
  end
  if BETWEEN[run.state] and not run.retry_at then
    broken(key, 'to be retried, and not said when')
  end
  if run.cancel ~= '' and not CANCELLED_AS[run.cancel] then
    broken(key, 'cancel ' .. run.cancel)
  end
end

-- Whether an instance is to be shown the run without asking for it: it waits, or is to stop.
local function is_news(run)
  return WAITS[run.state] or (run.cancel == 'requested' and not FINAL[run.state])
end

-- The slots of the runs that are news, as the job keeps them: heartbeats read them with the job.
local function news_of(key)
  local slots = {}
  for slot in string.gmatch(read(key, 'HGET', key, 'news') or '', '%d+') do
    slots[#slots + 1] = slot
  end
  return slots
end

local function note_news(key, slot, is_one)
  local slots = {}
  for _, each in ipairs(news_of(key)) do
    if each ~= slot then
      slots[#slots + 1] = each
    end
  end
  if is_one then
    slots[#slots + 1] = slot
  end
  if #slots > 0 then
    redis.call('HSET', key, 'news', table.concat(slots, ' '))
  else
    redis.call('HDEL', key, 'news')
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
  run.new, run.trigger = false, nil
  for i, field in ipairs(FIELDS) do
    local value = values[i]
    if value and value ~= '' then
      run.stored[field] = value
      run[field] = KIND[field] == 'text' and value or number(key, value)
    end
  end
  check_run(key, run)
  run.was_news = is_news(run)
  return run
end

-- Brings `stored` up to date; what changed, as HSET takes it. A field is '' where it is nothing.
local function changes_of(run)
  local changes, stored = {}, run.stored
  for _, field in ipairs(FIELDS) do
    local value = run[field] or ''
    if type(value) == 'number' then
      value = (value == 0 and KIND[field] == 'count') and '' or text(value)
    end
    if value ~= (stored[field] or '') then
      changes[#changes + 1] = field
      changes[#changes + 1] = value
      stored[field] = value
    end
  end
  return changes
end

local function save_run(job_key, run)
  local slot, changes = run.stored.slot, changes_of(run)
  if #changes > 0 then
    redis.call('HSET', job_key .. ':' .. slot, unpack(changes))
  end
  if run.new then
    mark(job_key)
    redis.call('ZADD', job_key .. ':runs', slot, slot)
    run.new = false
  end
  local news = is_news(run) or false
  if news ~= (run.was_news or false) then
    note_news(job_key, slot, news)
    run.was_news = news
  end
  if FINAL[run.state] and run.trigger == 'manual' then
    redis.call('HDEL', job_key .. ':payloads', slot)
  end
end

local function end_run(run, state, reason)
  run.state, run.reason, run.ended_at = state, reason, NOW
end

-- The run for an answer, as it is stored.
local function shown(run)
  return run and run.stored
end

-- The attempt is over without a result, and the run with it: nobody takes over.
local function give_up(run, reason)
  run.attempt_state, run.attempt_reason, run.attempt_ended_at = 'interrupted', reason, NOW
  run.lost = reason == 'runner_lost' and 1 or 0
  if run.cancel ~= '' then
    run.attempt_state, run.attempt_reason = 'failed', CANCELLED_AS[run.cancel]
    end_run(run, 'failed', run.attempt_reason)
  else
    end_run(run, 'failed', reason == 'not_accepted' and 'not_accepted' or 'runner_lost')
  end
end

-- Answers -----------------------------------------------------------------------------------

-- What is done for the items, by the name that an item gives (`act`).
local acts = {}

local function reply()
  local answers = {}
  for i, item in ipairs(batch.items) do
    local answer, why = unless_broken(acts[item.act], item, KEYS[i])
    answers[i] = answer or { outcome = 'broken', broken = why }
  end
  if batch.durable then
    -- A repeated call may have nothing to write, and waiting for replicas or the disk means this
    -- connection's last write. With this one, all that stood in the server before is waited for.
    redis.pcall('HSET', KEYS[#KEYS], 'asked_at', text(NOW))
  end
  return cjson.encode({ now_us = text(NOW_US), answers = answers })
end
