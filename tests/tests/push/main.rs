//! Deliveries without a socket: http_push, claims, redrives; and calls of event subscriptions.

mod answers;
mod dead_letters;
mod dispatch;
mod health;
mod poll;
mod subscription_calls;
mod workers;
